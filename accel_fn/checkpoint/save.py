"""save: write a checkpoint of the whole world, which appears only when it is complete."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from accel_fn.checkpoint import arguments as checks
from accel_fn.checkpoint import compare
from accel_fn.checkpoint.arguments import stateful
from accel_fn.checkpoint.background import Background, finish_writing
from accel_fn.checkpoint.files import hash_of, make_folder, memory_of, sync, to_plain
from accel_fn.checkpoint.manifest import FrozenEntry, Manifest
from accel_fn.checkpoint.names import COMMON, absolute, file_of
from accel_fn.checkpoint.run_state import (
    RunState,
    in_whole,
    named_steps,
    notes_of,
    run_state_of,
    scale_to_dict,
)
from accel_fn.checkpoint.schedules import moved_functions
from accel_fn.checkpoint.store import NewCheckpoint, Run, tidy
from accel_fn.checkpoint.tensors import (
    Share,
    Written,
    name_of_dtype,
    plan_parts,
    to_entries,
    write_error,
)
from accel_fn.core.collectives import agreed, all_or_none
from accel_fn.core.primitives import exchange
from accel_fn.core.restored import in_eval_mode, random_state
from accel_fn.core.state import DistState, check_state, check_world, mesh_of
from accel_fn.core.step import Step
from accel_fn.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    check_count,
    check_flag,
    check_folder,
    check_only,
    message,
)
from accel_fn.observe.explain import explain
from accel_fn.observe.progress import bytes_bar
from accel_fn.parallel.file_lock import FileLock

EXTRA = "extras/"
# Read the version at import: the user may install another one while this program runs.
_VERSION = version("accel-fn")


def save(
    step: Step | Mapping[str, Step],
    state: DistState,
    folder: str | os.PathLike[str],
    *,
    extras: Mapping[str, Any] | None = None,
    keep: int | None = None,
    keep_every: int | None = None,
    score: float | None = None,
    keep_best: int = 0,
    beside: Callable[[Path], object] | None = None,
    only: str | None = None,
    wait: bool = True,
) -> Path:
    """Save the run as the checkpoint `step_NNNNNNNN` of a folder. Called on every rank.

    It holds parameters and buffers of the model, the optimizer, the loss scale, the state of
    transforms, `state.step`, `call`, `samples`, `items` and seed, every rank's random generators, and the
    extras. For frozen models it holds names, shapes and a hash of each tensor. The checkpoint gets
    its name once all of it is on the disk. So if the run is killed, a checkpoint is complete or not
    there. An optimizer with train and eval modes is saved in eval mode, and is back in train mode
    when `save` returns. A function of a schedule is called again: if its rate has changed since it
    was set, `load` keeps the saved rate.

    Args:
        step: the step, or a dict of steps by name.
        state: the state after the last step.
        folder: the folder of this run's checkpoints, on a file system that all machines share; made
            if missing; `~` is your home folder.
        extras: more objects to save, by name, with the same names on all ranks. Each rank's own are
            saved: anything with `state_dict` and `load_state_dict`, a dict of numbers, strings and
            tensors, or a `torch.Generator`.
        keep: how many whole checkpoints stay, >= 1; None: all. The one from which this run
            was resumed stays.
        keep_every: checkpoints at multiples of this number of steps also stay.
        score: the score of this checkpoint, higher is better: an accuracy, or a loss with a minus.
            NaN is never the best. `list_checkpoints` returns it.
        keep_best: this many checkpoints with the highest scores also stay, in addition to the
            newest `keep`.
        beside: `path -> None`, called on the main rank: writes your own files into the checkpoint's
            folder before it gets its name, such as adapters or a configuration. `load` does not
            read them.
        only: "trained": leave out parameters that require no gradient, and required none in `build`. A
            checkpoint of adapters then holds the adapters and their optimizer state. `load` leaves
            the parameters of the program that were left out as they are, and refuses, by a hash, a
            program in which they have other values. Default: save all.
        wait: False: return once this rank's share is copied, and write it in a thread. The next
            `save` or `load` of the step waits for it, and so does the end of the process.

    Returns:
        The checkpoint's folder, as an absolute path; with `wait=False`, its future path.

    Raises:
        ValueError: on every rank: an argument breaks its rule or differs between ranks, `keep_best`
            is given without `keep`, extras hold more than tensors and plain data, the model has a
            tensor that was expanded, or of which ranks hold parts that are not DTensors, or a
            tensor that is left out, by `only` or as a frozen model, has changed since it was last
            saved or loaded.
        Exception: raised by `beside` on the main rank; a `RuntimeError` on the other ranks.
        RuntimeError: on every rank: the folder cannot be written, or another run saves to it. The
            checkpoints that exist stay as they are. A failure in the background is
            raised by the next `save` or `load` of the step; if there is none, it is
            logged at the end of the process, whose exit code is then 1.

    Warns:
        UserWarning: once, on the main rank: an optimizer of a class outside of torch has changed a number
            that is an attribute of it, and its `state_dict` is torch's own, which does not hold it.

    Cost: writes the state once, each rank its share; a few small collectives; it waits for an accelerator
        once for each 256 MiB of the share. With `wait=False`,
        one copy of the share, into host memory that is kept for the next time (pinned for an
        accelerator); no collective in the background. The first `save` or `load` reads each
        tensor of a frozen model, and with `only` each frozen parameter, on one rank, gathers those in
        shards, and hashes it; a later one reads 64 elements
        of each, and the whole again if torch has counted a write.

    >>> import tempfile, accel_fn as af
    >>> state, step = af.build(af.Plan(loss_fn, model, optimizer), af.DistState())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     af.save(step, state, folder).name
    'step_00000000'
    """
    check_state("save", state)
    check_world("save", state)
    began = perf_counter()
    steps, extras = named_steps(step), {} if extras is None else extras

    def check() -> None:
        for name, count in (("keep", keep), ("keep_every", keep_every)):
            if count is not None:
                check_count("save", name, count)
        check_count("save", "keep_best", keep_best, minimum=0)
        if keep_best and keep is None:
            rule, repair = "be given beside keep", "without keep, all checkpoints stay"
            raise ArgumentError(message("save", "keep_best", rule, keep_best, repair))
        if score is not None and (isinstance(score, bool) or not isinstance(score, numbers.Real)):
            raise ArgumentTypeError(message("save", "score", "be a number", score))
        if beside is not None and not callable(beside):
            raise ArgumentTypeError(message("save", "beside", "be a function of a path", beside))
        check_only("save", only)
        check_flag("save", "wait", wait)
        absolute(check_folder("save", folder))
        for each in steps.values():
            checks.check_plan(each.plan, "check_saved")

    given: dict[str, object] = {"state.step": state.step, "state.call": state.call}
    given |= {"wait": wait, "only": only, "score": score}
    given |= {"keep": keep, "keep_every": keep_every, "keep_best": keep_best}
    given |= {"beside": None if beside is None else "a function"}
    home = checks.check_call("save", state, folder, steps, extras, check, **given)
    checks.check_filled(steps, "save")
    finish_writing(notes_of(steps), state, "save")
    optimizers = chain.from_iterable(each.plan.optimizers.values() for each in steps.values())

    def collect() -> RunState:
        contents = run_state_of(steps)
        checks.check_model(contents.tensors, steps, "save")
        contents.moved.extend(moved_functions(steps, extras))
        return contents

    with in_eval_mode(optimizers), in_whole(steps, writes=False):
        contents = all_or_none(collect, state, "save")
        left_out = {**contents.frozen, **(compare.take_frozen(contents, steps) if only else {})}
        frozen = _frozen_entries(left_out, notes_of(steps), state)
        head = Manifest(
            step=state.step,
            call=state.call,
            seed=state.seed,
            samples=state.samples,
            items=state.items,
            world_size=state.world_size,
            mesh=mesh_of(state),
            score=None if score is None else float(score),
            accel_fn=_VERSION,
            torch=str(torch.__version__),
            plans=contents.plans,
            tied=contents.tied,
            explained={name: explain(each.plan, state) for name, each in steps.items()},
            entries=to_entries(contents.tensors),
            frozen=frozen,
            files={},
        )
        run = notes_of(steps).setdefault("run", Run())
        checkpoint = NewCheckpoint(absolute(home), head, keep, keep_every, keep_best, run)
        _write(checkpoint, contents, stateful(extras), state, notes_of(steps), beside, wait=wait)
    seconds = perf_counter() - began
    for observer in chain.from_iterable(each.observers.every for each in steps.values()):
        observer.saved(state, seconds, checkpoint.final)
    return checkpoint.final


def _write(
    checkpoint: NewCheckpoint,
    contents: RunState,
    extras: Mapping[str, Any],
    state: DistState,
    notes: dict[str, Any],
    beside: Callable[[Path], object] | None,
    *,
    wait: bool,
) -> None:
    """Write the checkpoint; without `wait`, copy this rank's share for a thread to write."""

    def on_main(fn: Callable[..., object], *arguments: object) -> None:
        all_or_none(lambda: fn(*arguments) if state.is_main else None, state, "save")

    def write() -> Written:
        with bytes_bar("save", share.num_bytes(), is_main=state.is_main) as count:
            return share.write(checkpoint.path, count)

    on_main(_begin, checkpoint, notes)
    try:
        if beside is not None:
            on_main(_put_beside, checkpoint.path, beside)
        share = _share(state, contents, extras)
        if wait:
            on_main(checkpoint.commit, agreed(write, state, "save"))
            return
        background, locks = notes.setdefault("background", Background()), notes.get("locks")
        writing = all_or_none(
            lambda: background.copy(share, checkpoint, state, locks), state, "save"
        )
        all_or_none(lambda: background.start(writing), state, "save")
    except BaseException:
        if state.is_main:
            checkpoint.discard()
        if "background" in notes:
            notes["background"].drop()
        raise


def _begin(checkpoint: NewCheckpoint, notes: dict[str, Any]) -> None:
    """Lock the run's folder, and make the checkpoint's folder. Raise if another run holds the lock."""
    home = checkpoint.home
    try:
        make_folder(home)
        locks, real = notes.setdefault("locks", {}), home.resolve()
        if real not in locks or not locks[real].holds():
            lock = FileLock(home / ".lock")
            if lock.owner is not None:
                raise CheckpointError(
                    f"save: {home} must be saved to by one run at a time, got a second one beside "
                    f"{lock.owner}; give each run a folder of its own"
                )
            locks[real] = lock
        tidy(home)
        checkpoint.path.mkdir()
    except OSError as error:
        raise write_error(checkpoint.path, error) from error


def _put_beside(path: Path, beside: Callable[[Path], object]) -> None:
    """Call `beside`, which adds the user's files to the unfinished checkpoint; sync every file."""
    beside(path)
    for each in path.rglob("*"):
        sync(each)


def _share(state: DistState, contents: RunState, extras: Mapping[str, Any]) -> Share:
    own = _own_buffers(contents, state)
    shared = contents.tensors
    # Buffers may differ between ranks. Rank 0 saves its own buffers here; other ranks save those that
    # differ from rank 0's (`own`).
    if not state.is_main:
        buffers = set(contents.buffers)
        shared = {name: shared[name] for name in shared if name not in buffers}
    parts = plan_parts(shared, state)

    def files() -> dict[str, bytes]:
        data = {"buffers": own, "random": random_state(state.device)}
        data |= {f"{EXTRA}{name}": extra.state_dict() for name, extra in extras.items()}
        packed = {file_of("rank", state.rank, "pt"): to_plain(data, "save")}
        if state.is_main:
            common = {"scaler": scale_to_dict(state.scaler), "steps": contents.rest}
            packed[COMMON] = to_plain({**common, "moved": contents.moved}, "save")
        return packed

    return Share(state.rank, all_or_none(files, state, "save"), parts)


def _own_buffers(contents: RunState, state: DistState) -> dict[str, Tensor]:
    """Select this rank's buffers whose bytes differ from rank 0's."""
    if state.world_size == 1 or not contents.buffers:
        return {}
    buffers = {name: contents.tensors[name].cpu().contiguous() for name in contents.buffers}
    hashes = {name: hash_of(memory_of(buffer)) for name, buffer in buffers.items()}
    of_main = exchange(hashes, state, "save")[0]
    return {name: buffers[name] for name in buffers if hashes[name] != of_main.get(name)}


def _frozen_entries(
    left_out: Mapping[str, Tensor], notes: dict[str, Any], state: DistState
) -> dict[str, FrozenEntry]:
    """Hash the frozen tensors that the checkpoint leaves out; compare with earlier hashes.

    Raises if one has changed since the last save or load.
    """
    before = notes.get("frozen", {})
    found = compare.hashed(left_out, state, before, "save")
    # All ranks have the same hashes, so all raise or none.
    compare.check_unchanged(before, found)
    notes["frozen"] = {**before, **found}
    return {
        name: FrozenEntry(name_of_dtype(each.dtype), tuple(each.shape), found[name].hash)
        for name, each in left_out.items()
    }
