"""save: a checkpoint of the whole world, there when it is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_fn._collectives import all_or_none
from accel_fn._comm import exchange
from accel_fn._errors import ArgumentTypeError, CheckpointError, check_count, message
from accel_fn._explain import tell
from accel_fn._state import DistState
from accel_fn._step import Step
from accel_fn.checkpoint._contents import Contents, contents_of, named_steps, scale_to_dict
from accel_fn.checkpoint._hashing import FileMark, hash_of, memory_of, sync, write_file
from accel_fn.checkpoint._locking import FolderLock
from accel_fn.checkpoint._manifest import NAME, Chunk, Manifest
from accel_fn.checkpoint._naming import draft_of, name_of, publish
from accel_fn.checkpoint._plain import to_plain
from accel_fn.checkpoint._planning import Part, plan_parts, to_entries
from accel_fn.checkpoint._random import random_state
from accel_fn.checkpoint._retaining import retain, tidy

COMMON, EXTRA = "common.pt", "extras/"


def save(
    folder: str | os.PathLike[str],
    state: DistState,
    step: Step | Mapping[str, Step],
    *,
    extras: Mapping[str, Any] | None = None,
    keep: int | None = None,
    keep_every: int | None = None,
) -> Path:
    """Save the run as the checkpoint `step_NNNNNNNN` of a folder. Called on every rank.

    Saved are parameters and buffers, the optimizer, the loss scale, what transforms
    keep, `state.step` and seed, every rank's random generators, and the extras. The
    checkpoint has its name once all of it is on the disk: killed at any instant, a
    reader sees it whole or not at all.

    Args:
        folder: of this run's checkpoints, on a file system that all machines share; made if needed.
        state: after the last step.
        step: the step, or a dict of steps by name.
        extras: anything with `state_dict` and `load_state_dict`, by name; saved of every rank.
        keep: how many whole checkpoints stay, >= 1; None: all. The one that this run
            was resumed from stays.
        keep_every: checkpoints at multiples of so many steps stay, too.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: on every rank, an argument is outside its rule, or extras hold more than
            tensors and plain data.
        RuntimeError: on every rank: the folder cannot be written, or another run saves to it. The
            checkpoints that are there stay as they are.

    Cost: writes the state once, each rank its share; a few small collectives.

    >>> import tempfile, accel_fn as af
    >>> state, step = af.build(af.DistState(), af.Plan(loss_fn, model, optimizer))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     af.save(folder, state, step).name
    'step_00000000'
    """
    steps, extras, home = named_steps(step), extras or {}, Path(folder)
    contents = all_or_none(lambda: _check(steps, extras, keep, keep_every), state, "save")
    notes = next(iter(steps.values())).notes
    draft = draft_of(home, state.step)
    try:
        all_or_none(lambda: _begin(home, draft, state, notes), state, "save")
        own = _own_buffers(contents, state)
        shared = contents.tensors
        if not state.is_main:  # what is no replica is saved as rank 0 has it
            buffers = set(contents.buffers)
            shared = {name: each for name, each in shared.items() if name not in buffers}
        parts = plan_parts(shared, state)
        mine = all_or_none(
            lambda: _write(draft, state, contents, own, extras, parts), state, "save"
        )
        written = exchange(mine, state, "save")
        final = home / name_of(state.step)

        def finish() -> None:
            if state.is_main:
                _publish(draft, final, _manifest(state, steps, contents, written))
                if keep is not None:
                    retain(home, keep, keep_every, notes.get("resumed_from"))

        all_or_none(finish, state, "save")
    except BaseException:
        if state.is_main:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    return final


@dataclass(frozen=True, slots=True)
class _Written:
    """What a rank has written."""

    chunks: Sequence[tuple[str, Chunk]]
    files: Mapping[str, FileMark]


def _check(
    steps: Mapping[str, Step], extras: Mapping[str, Any], keep: int | None, keep_every: int | None
) -> Contents:
    if not steps or not all(isinstance(each, Step) for each in steps.values()):
        raise ArgumentTypeError(message("save", "step", "be a Step or a dict of Steps", steps))
    for name, count in (("keep", keep), ("keep_every", keep_every)):
        if count is not None:
            check_count("save", name, count)
    check_extras(extras, "save")
    return contents_of(steps)


def check_extras(extras: Mapping[str, Any], function: str) -> None:
    """They must be able to say what they keep, and to take it back."""
    for name, extra in extras.items():
        if not (hasattr(extra, "state_dict") and hasattr(extra, "load_state_dict")):
            raise ArgumentTypeError(
                message(function, f"extras[{name!r}]", "have state_dict and load_state_dict", extra)
            )


def _begin(home: Path, draft: Path, state: DistState, notes: dict[str, Any]) -> None:
    if not state.is_main:
        return
    try:
        if not home.is_dir():
            home.mkdir(parents=True, exist_ok=True)
            sync(home.parent)
        lock = notes.get("lock")
        if lock is None or not lock.holds(home):
            notes["lock"] = FolderLock(home)
        tidy(home)
        draft.mkdir()
    except OSError as error:
        raise _failed(draft, error) from error


def _write(
    draft: Path,
    state: DistState,
    contents: Contents,
    own: Mapping[str, Tensor],
    extras: Mapping[str, Any],
    parts: Sequence[Part],
) -> _Written:
    """This rank's files."""
    data = {"buffers": own, "random": random_state(state.device)}
    data |= {f"{EXTRA}{name}": extra.state_dict() for name, extra in extras.items()}
    files = {rank_file(state.rank): to_plain(data, "save")}
    if state.is_main:
        rest = {"scaler": scale_to_dict(state.scaler), "steps": contents.rest}
        files[COMMON] = to_plain(rest, "save")
    file = f"tensors_{state.rank:05d}.bin"
    chunks: list[tuple[str, Chunk]] = []
    try:
        marks = {name: write_file(draft / name, [data]) for name, data in files.items()}
        if parts:
            marks[file] = write_file(draft / file, _bytes_of(parts, file, chunks))
    except OSError as error:
        raise _failed(draft, error) from error
    return _Written(chunks, marks)


def _own_buffers(contents: Contents, state: DistState) -> dict[str, Tensor]:
    """Buffers that are not what rank 0 has, bit for bit."""
    if state.world_size == 1 or not contents.buffers:
        return {}
    buffers = {name: contents.tensors[name].cpu().contiguous() for name in contents.buffers}
    hashes = {name: hash_of(memory_of(buffer)) for name, buffer in buffers.items()}
    theirs = exchange(hashes, state, "save")[0]
    return {name: buffers[name] for name in buffers if hashes[name] != theirs.get(name)}


def rank_file(rank: int) -> str:
    """The file of what a rank has for itself."""
    return f"rank_{rank:05d}.pt"


def _bytes_of(
    parts: Sequence[Part], file: str, chunks: list[tuple[str, Chunk]]
) -> Iterator[memoryview]:
    """The bytes of tensors, one after another; notes where each begins."""
    start = 0
    for part in parts:
        view = memory_of(part.tensor.cpu().contiguous())
        shape = tuple(part.tensor.shape)
        offsets = part.offsets or (0,) * len(shape)
        chunks.append((part.name, Chunk(offsets, shape, file, start, len(view))))
        start += len(view)
        yield view


def _manifest(
    state: DistState,
    steps: Mapping[str, Step],
    contents: Contents,
    written: Sequence[_Written],
) -> Manifest:
    return Manifest(
        step=state.step,
        seed=state.seed,
        world_size=state.world_size,
        accel_fn=version("accel-fn"),
        torch=str(torch.__version__),
        plans=contents.plans,
        tied=contents.tied,
        explained={name: tell(each.plan, state) for name, each in steps.items()},
        entries=to_entries(contents.tensors, [each.chunks for each in written]),
        files={name: mark for each in written for name, mark in each.files.items()},
    )


def _publish(draft: Path, final: Path, manifest: Manifest) -> None:
    try:
        for name, mark in manifest.files.items():
            path = draft / name
            if not path.exists() or path.stat().st_size != mark.size:
                raise CheckpointError(
                    f"save: folder must be on a file system that all ranks share, got {final.parent}, "
                    f"in which rank 0 does not find {name}"
                )
        write_file(draft / NAME, [manifest.to_bytes()])
        sync(draft)
        publish(draft, final)
        tidy(final.parent)
    except OSError as error:
        raise _failed(draft, error) from error


def _failed(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"save: folder must be one that can be written to, got {str(path.parent)!r} "
        f"({error.strerror or error}); checkpoints that were there are as they were"
    )
