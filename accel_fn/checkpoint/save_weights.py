"""Save the weights of a model alone: `save_model` to files, `whole_state_dict` to the main rank's memory."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from accel_fn.checkpoint.background import Writing, report_failure
from accel_fn.checkpoint.files import hash_of, hash_of_tensor, make_folder
from accel_fn.checkpoint.run_state import read_whole, split_tied
from accel_fn.checkpoint.tensors import Written, name_of_dtype
from accel_fn.checkpoint.weight_files import (
    Entries,
    NewSet,
    check_storable,
    folder_of_set,
    new_token,
    probe_of,
    read_entries,
    split,
)
from accel_fn.core.collectives import all_or_none
from accel_fn.core.dtensor import is_sharded
from accel_fn.core.plan import unwrapped
from accel_fn.core.ranks import Ranks
from accel_fn.core.state import DistState, check_state, check_world
from accel_fn.core.warn import warn_user
from accel_fn.core.zero import gathered, world_of
from accel_fn.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    check_count,
    check_equal,
    check_flag,
    check_only,
    message,
)
from accel_fn.observe.progress import bytes_bar

_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}


_MOST_SHOWN = 10
_writings: WeakKeyDictionary[nn.Module, Writing] = WeakKeyDictionary()
"""For each model, its last background save."""


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    *,
    dtype: torch.dtype | None = None,
    only: str | None = None,
    wait: bool = True,
    state: DistState | None = None,
) -> None:
    """Write parameters and persistent buffers as safetensors files, in Hugging Face's layout.

    The folder gets `model.safetensors`, or, above `max_shard_size`,
    `model-00001-of-0000N.safetensors` ... and `model.safetensors.index.json`. Keys are those
    of the model's `state_dict()`; a model in DDP or `torch.compile` is saved as the one inside. A
    tensor with several names (tied weights) is written once, under the first; the file's
    metadata list the other names.

    A process that is killed at any moment leaves the old set or the new one, and a reader gets one of
    the two, or an error. The files of earlier saves are removed at the end; no other file of the
    folder is touched. Only one process or world at a time may write to a folder. Without hard links,
    replacing a set by one of as many shards copies its files.

    Under `wrap_fsdp` and `wrap_tp`, call it on every rank. The files go round the ranks, and each
    tensor is gathered to the rank that writes it alone: no rank holds more than its shards and one
    tensor. Names, index and bytes are those that one process writes. Under stage 3 of `wrap_deepspeed`,
    call it on every rank too; the first one writes. A model that each rank holds whole is
    saved on one rank: `af.on_main(lambda: af.save_model(model, folder), state)`; with `state`, all ranks
    call it, and the main rank writes.
    Plain tensors count as whole, even if your own strategy gives each rank a part of them.

    Args:
        model: a model with dense tensors of the dtypes that safetensors knows, on any device.
        folder: the folder for the files; made if it does not exist. Ranks that write share it: if one
            does not see it, the main rank writes all.
        max_shard_size: the size of the tensors in one file, in bytes or as "5GB" (10**9) or
            "512MiB" (2**20); a larger tensor gets a separate file.
        dtype: the dtype of the floating-point tensors in the files, such as `torch.bfloat16`; the
            model does not change. Default: the dtype of each tensor.
        only: "trained": leave out parameters that require no gradient, such as the base of adapters. The
            files list them, each with a hash. Default: write all.
        wait: False: return when this rank's files are gathered in host memory, and write them in a
            thread. No gather can run at the same time as the collectives of training, so a rank
            holds its shards and all its files: about the model divided by the number of ranks. The
            next `save_model` of the model waits for the thread, and so does the end of the process.
            If a rank is lost, that takes ten minutes at most; with `state`, ten seconds after a
            collective has failed.
        state: this rank's state. All its ranks then compare the names, dtypes and shapes that they
            hold; without it, the ranks of the model's mesh do.

    Raises:
        TypeError: `dtype` is not a floating-point dtype.
        ValueError: `max_shard_size` is not a size, or an argument or a tensor's name, dtype or shape differs
            between ranks, as for the parts of a pipeline, or the model holds something other than dense
            tensors with values, or two tensors that share a part of their memory, or, with `only`,
            no parameter that requires a gradient.
        OSError: the files cannot be written; earlier files stay. With `wait=False`, the next
            `save_model` of the model raises a RuntimeError; if there is none, the failure is
            logged at the end of the process, whose exit code is then 1.
        RuntimeError: another rank failed.

    Warns:
        UserWarning: on the main rank: not all ranks see the folder, so the main rank writes all files.

    Law: any number of ranks writes the files that one process writes, to the byte.
    Tests: `tests/laws/law09_saving_by_ranks.py`.

    Cost: one write of the model, each rank its files, and a wait for the disk; on the host, a copy
    of one tensor. For a sharded model, one gather of each sharded tensor along each axis that cuts
    it, a broadcast of each other tensor, and about ten small collectives. With `only`, one read of
    the omitted parameters.

    >>> import os, tempfile, torch, accel_fn as af
    >>> folder = tempfile.mkdtemp()
    >>> af.save_model(torch.nn.Linear(2, 1), folder)
    >>> os.listdir(folder)
    ['model.safetensors']
    """
    if state is not None:
        check_state("save_model", state)
        check_world("save_model", state)
    with gathered(model):
        ranks = _ranks_of("save_model", model)
        world = ranks if state is None else Ranks("save_model", [state])
        given = {"max_shard_size": max_shard_size, "dtype": dtype, "only": only, "wait": wait}
        found: list[_Contents] = []

        def collect() -> dict[str, str]:
            check_flag("save_model", "wait", wait)
            _finish_writing(model)
            found.append(_contents_of(model, folder, max_shard_size, dtype, only))
            return {name: repr(value) for name, value in given.items()}

        every = world.agreed(collect)
        for name in given:
            rule = f"save_model: {name} must be the same on every rank"
            check_equal([each[name] for each in every], rule, error=ArgumentError)
        (contents,) = found
        _check_same(contents.tensors, world)
        # Several groups of ranks may each hold a replica. Only the group with the state's rank 0
        # writes.
        is_writing = state is None or 0 in ranks.agreed(lambda: state.rank)
        jobs: list[_Job] = []
        world.agreed(lambda: jobs.append(_job_of(contents, ranks)) if is_writing else None)
        if wait:
            _write(jobs, world)
        else:
            _write_later(jobs, world, model, state)


@dataclass(frozen=True, slots=True)
class _Contents:
    """The tensors of a model, and the folder and shards in which they are written."""

    folder: Path
    entries: Entries
    frozen: Mapping[str, Tensor]
    """The frozen parameters, which the files do not hold."""
    shards: Sequence[Sequence[str]]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.entries.tensors, **self.frozen}


def _contents_of(
    model: nn.Module,
    folder: str | os.PathLike[str],
    max_shard_size: int | str,
    dtype: torch.dtype | None,
    only: str | None,
) -> _Contents:
    limit = parse_size("save_model", max_shard_size)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        rule = "be a floating-point torch.dtype or None"
        raise ArgumentTypeError(message("save_model", "dtype", rule, dtype))
    check_only("save_model", only)
    path = folder_of_set("save_model", folder)
    entries = replace(read_entries("save_model", model), dtype=dtype)
    frozen = _frozen(model, entries) if only else {}
    tensors = {name: each for name, each in entries.tensors.items() if name not in frozen}
    entries = replace(entries, tensors=tensors)
    check_storable(entries)
    return _Contents(path, entries, frozen, split(entries, limit))


def _frozen(model: nn.Module, entries: Entries) -> dict[str, Tensor]:
    """Select the parameters that require no gradient."""
    parameters = dict(unwrapped(model).named_parameters())
    if not any(each.requires_grad for each in parameters.values()):
        rule = 'have a parameter that requires a gradient with only="trained"'
        raise ArgumentError(message("save_model", "model", rule, type(model).__name__))
    names = [name for name, each in parameters.items() if not each.requires_grad]
    return {name: entries.tensors[name] for name in names if name in entries.tensors}


# -- the ranks


def _ranks_of(function: str, model: nn.Module) -> Ranks:
    """Return the ranks that hold a model together: only this rank if it holds the whole model."""
    if not isinstance(model, nn.Module):
        return Ranks(function, [])
    world = world_of(model)
    if world:
        return Ranks(function, world)
    saved = unwrapped(model).state_dict().values()
    return Ranks.of(function, [each for each in saved if isinstance(each, Tensor)])


def _check_same(tensors: Mapping[str, Tensor], world: Ranks) -> None:
    """Refuse ranks that hold different tensors, such as the parts of a pipeline."""
    if world.size == 1:
        return
    own = {name: _described(each) for name, each in tensors.items()}
    # Ranks exchange hashes first, and names only if the hashes differ. All ranks see the same
    # hashes, so all make the same choice.
    if len({*world.agreed(lambda: hash_of(repr(own).encode()))}) == 1:
        return
    every, lines = world.agreed(lambda: own), []
    for name in dict.fromkeys(name for held in every for name in held):
        ranks = [rank for rank, held in enumerate(every) if name in held]
        specs: dict[str, int] = {}
        for rank in ranks:
            specs.setdefault(every[rank][name], rank)
        if len(ranks) < len(every):
            lines.append(f"{name}: on {_listed(ranks)} of {len(every)} alone")
        elif len(specs) > 1:
            there = [f"{spec} on rank {rank}" for spec, rank in specs.items()]
            lines.append(f"{name}: {' and '.join(there)}")
    lines = lines or ["the order of the tensors"]
    more = [f"and {len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else []
    rule = f"{world.function}: model must hold the same tensors on every rank, got differences:"
    repair = (
        "save the parts, such as stages of a pipeline, to one folder each, from their own ranks"
    )
    raise ArgumentError("\n  ".join([rule, *lines[:_MOST_SHOWN], *more]) + f"\n{repair}")


def _described(tensor: Tensor) -> str:
    cut = " in shards" if is_sharded(tensor) else ""
    return f"{name_of_dtype(tensor.dtype)} {list(tensor.shape)}{cut}"


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# -- the files


@dataclass(frozen=True, slots=True)
class _Job:
    """A set of files, and the ranks that write the files."""

    new: NewSet
    ranks: Ranks
    num_writers: int
    """The number of ranks that write. They take the files in turn."""

    @property
    def is_main(self) -> bool:
        return self.ranks.rank == 0

    @property
    def own(self) -> list[int]:
        """Return the numbers of the files that this rank writes."""
        count = self.num_writers
        return [at for at in range(self.new.num_files) if at % count == self.ranks.rank]

    def values(self) -> Iterator[Tensor]:
        """Gather each tensor on the rank that writes it; yield those of this rank, in the files' order."""
        with bytes_bar("write", self.new.num_bytes(), is_main=self.is_main) as count:
            for place, key in self.new.order():
                found = self.ranks.gather_to(self.new.prepared(key), place % self.num_writers)
                if found is not None:
                    yield found
                # Free this tensor before the next one is gathered.
                del found
                count(self.new.entries.num_bytes(key))

    def write(self) -> None:
        values = self.values()
        try:
            self.new.write(self.own, values)
        finally:
            # Gather after an error too, since other ranks wait in the next gather.
            deque(values, maxlen=0)
        # Sync after all gathers, so that no rank waits in a gather for another rank's disk.
        self.new.sync(self.own)


def _job_of(contents: _Contents, ranks: Ranks) -> _Job:
    """Make the folder, hash the omitted parameters, and choose the ranks that write."""
    folder, is_main = contents.folder, ranks.rank == 0

    def begin() -> str:
        if is_main:
            make_folder(folder)
        return new_token() if is_main else ""

    token = "".join(ranks.agreed(begin))
    is_split = len(contents.shards) > 1 and any(map(is_sharded, contents.tensors.values()))
    num_writers = _num_writers(folder, probe_of(token), contents, ranks) if is_split else 1
    frozen = {**contents.entries.frozen, **_hashes(contents.frozen, ranks)}
    entries = replace(contents.entries, frozen=frozen)
    return _Job(NewSet(folder, entries, contents.shards, token), ranks, num_writers)


def _num_writers(folder: Path, probe: str, contents: _Contents, ranks: Ranks) -> int:
    """Return how many ranks write: all of a mesh if each can write to the main rank's folder, else one."""
    path, is_main = folder / probe, ranks.rank == 0
    ranks.agreed(lambda: path.touch() if is_main else None)
    seen = ranks.agreed(lambda: _can_write(path))
    blind = [rank for rank, is_seen in enumerate(seen) if not is_seen]

    def end() -> None:
        if is_main:
            path.unlink()
        if is_main and blind:
            size = sum(map(contents.entries.num_bytes, contents.entries.tensors))
            warn_user(
                f"save_model: folder should be one that all ranks see and can write to, got {str(folder)!r}, "
                f"in which {_listed(blind)} cannot find or write a file of rank 0; rank 0 writes all "
                f"{size / 1e9:.3g} GB, tensor by tensor, and with wait=False holds them on its host"
            )

    ranks.agreed(end)
    return 1 if blind or not ranks.is_mesh else ranks.size


def _can_write(path: Path) -> bool:
    try:
        path.open("r+b").close()
    except OSError:
        return False
    return True


def _hashes(frozen: Mapping[str, Tensor], ranks: Ranks) -> dict[str, str]:
    """Hash the whole frozen tensors; return all hashes on every rank.

    Ranks of a mesh take sharded tensors in turn; the main rank hashes all others.
    """
    if not frozen:
        return {}
    own = {}
    for at, (name, tensor) in enumerate(frozen.items()):
        rank = at % ranks.size if is_sharded(tensor) and ranks.is_mesh else 0
        whole = ranks.gather_to(tensor, rank)
        if whole is not None:
            own[name] = hash_of_tensor(whole)
    found = {name: each for hashes in ranks.agreed(lambda: own) for name, each in hashes.items()}
    return {name: found[name] for name in frozen}


def write_set(folder: Path, entries: Entries, limit: int) -> None:
    """Write tensors as a set of files, without other ranks: this rank holds them whole."""
    alone = Ranks("save_model", [])
    _write([_job_of(_Contents(folder, entries, {}, split(entries, limit)), alone)], alone)


def _write(jobs: Sequence[_Job], world: Ranks) -> None:
    """Write the files; the main rank renames them after all ranks have written."""

    def write() -> None:
        for job in jobs:
            job.write()

    def commit() -> None:
        for job in jobs:
            if job.is_main:
                job.new.commit()

    try:
        world.agreed(write)
    except BaseException:
        for job in jobs:
            job.new.discard(job.own)
        raise
    world.agreed(commit)


# -- in the background


def _write_later(
    jobs: Sequence[_Job], world: Ranks, model: nn.Module, state: DistState | None
) -> None:
    """Gather this rank's files into host memory, and write them in a thread."""
    shares: list[_Share] = []

    def hold() -> None:
        for job in jobs:
            held = deque(each.to("cpu", copy=True) for each in job.values())
            shares.append(_Share(job, held))

    world.agreed(hold)

    def start() -> None:
        for share in shares:
            if share.rank >= share.job.num_writers:
                continue
            watchdog = state.watchdog if state is not None else None
            place = DistState(rank=share.rank, world_size=share.job.num_writers, watchdog=watchdog)
            writing = Writing(share, share, place, [], None)
            try:
                writing.start()
            except RuntimeError as error:
                # Without this report, the main rank's thread would wait for this rank's files.
                report_failure(share, share.rank, error)
                raise
            _writings[unwrapped(model)] = writing

    world.agreed(start)


def _finish_writing(model: nn.Module) -> None:
    """Wait until the files of the model's last save are written; raise its error, if any."""
    writing = _writings.pop(unwrapped(model), None) if isinstance(model, nn.Module) else None
    failure = writing.finish() if writing is not None else None
    if writing is not None and failure is not None:
        raise CheckpointError(
            f"save_model: {writing.checkpoint.final} must have been written in the background, but that "
            f"failed: {failure or repr(failure)}"
        ) from failure


@dataclass(frozen=True, slots=True)
class _Share:
    """The tensors of this rank's files, in host memory, and how to write and commit the files."""

    job: _Job
    held: deque[Tensor]

    @property
    def function(self) -> str:
        return self.job.ranks.function

    @property
    def rank(self) -> int:
        return self.job.ranks.rank

    @property
    def path(self) -> Path:
        return self.job.new.folder

    @property
    def final(self) -> Path:
        return self.job.new.folder

    def acknowledgement(self, rank: int) -> Path:
        return self.job.new.acknowledgement(rank)

    def files_of(self, rank: int) -> list[Path]:
        # `report_failure` would remove the files that this method returns, but `write` has already
        # removed the files of a rank that failed.
        return []

    def write(self, folder: Path) -> Written:
        new, own = self.job.new, self.job.own
        try:
            new.write(own, self._drained())
            new.sync(own)
        except BaseException:
            new.discard(own)
            raise
        return Written({}, {})

    def _drained(self) -> Iterator[Tensor]:
        while self.held:
            yield self.held.popleft()

    def commit(self, written: Sequence[Written]) -> None:
        self.job.new.commit()

    def discard(self) -> None:
        self.job.new.discard()


# -- whole_state_dict


def whole_state_dict(model: nn.Module, state: DistState) -> dict[str, Any]:
    """Copy the whole `state_dict` of a model to the host of the main rank. Every rank calls it.

    Use it for uploads, conversions and your own checks; `save_model` writes the weights to files.
    Keys are those of the model before it was wrapped or compiled.

    Args:
        model: the plan's model, under any strategy. (Under `local_sgd`, and for plain tensors into
            which your own strategy splits a tensor, the values of the main rank are copied.)
        state: this rank's state.

    Returns:
        On the main rank, copies of all tensors on the host: later steps do not change them. Tied
        tensors are one tensor. On the other ranks, an empty dict.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`.
        ValueError: ranks hold different names, dtypes or shapes, such as the parts of a pipeline.
        RuntimeError: another rank failed, for example out of memory.

    Cost: one gather of each sharded tensor to the main rank, one after another, and a copy of the model
    in the memory of the main rank; in a world of several, six small collectives.

    >>> import accel_fn as af
    >>> whole = af.checkpoint.whole_state_dict(model, af.DistState())
    >>> {name: list(value.shape) for name, value in whole.items()}
    {'weight': [1, 4], 'bias': [1]}
    """
    check_state("whole_state_dict", state)
    with gathered(model):
        return _copied(model, state)


def _copied(model: nn.Module, state: DistState) -> dict[str, Any]:
    saved = all_or_none(lambda: _read(model), state, "whole_state_dict")
    tensors = {name: each for name, each in saved.items() if isinstance(each, Tensor)}
    firsts, tied = split_tied(tensors, unwrapped(model))
    _check_same(firsts, Ranks("whole_state_dict", [state]))
    ranks = Ranks.of("whole_state_dict", firsts.values())
    numbers = ranks.agreed(lambda: state.rank)
    main = numbers.index(0) if ranks.is_mesh and 0 in numbers else 0

    def gather(tensor: Tensor) -> Tensor | None:
        return ranks.gather_to(tensor, main) if is_sharded(tensor) else tensor.detach()

    own = firsts if state.is_main else ()
    copies = read_whole(firsts, own, lambda _, value: value.to("cpu", copy=True), gather)
    saved |= all_or_none(copies, state, "whole_state_dict")
    saved |= {name: saved[first] for name, first in tied.items()}
    return saved if state.is_main else {}


def _read(model: nn.Module) -> dict[str, Any]:
    if not isinstance(model, nn.Module):
        rule, got = "be a torch.nn.Module", type(model).__name__
        raise ArgumentTypeError(message("whole_state_dict", "model", rule, got))
    return dict(unwrapped(model).state_dict())


def parse_size(function: str, size: int | str) -> int:
    if not isinstance(size, str):
        return check_count(function, "max_shard_size", size, repair='or give "5GB"')
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)", size)
    if found and found[2] in _UNITS:
        num_bytes = int(Decimal(found[1]) * _UNITS[found[2]])
        if num_bytes >= 1:
            return num_bytes
    rule = f"be a number of bytes >= 1, or one with a unit of {', '.join(_UNITS)}"
    raise ArgumentError(message(function, "max_shard_size", rule, size))
