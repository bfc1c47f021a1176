"""load and resume: continue a run from a checkpoint, at any world size."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from accel_fn.checkpoint import arguments as checks
from accel_fn.checkpoint import compare
from accel_fn.checkpoint.arguments import stateful
from accel_fn.checkpoint.background import finish_writing
from accel_fn.checkpoint.by_names import OfRun, by_names, without_new
from accel_fn.checkpoint.files import dict_from_plain
from accel_fn.checkpoint.manifest import read_manifest, renamed_rest
from accel_fn.checkpoint.names import (
    COMMON,
    COMMON_KEYS,
    file_of,
    name_of,
    reading,
    steps_in,
)
from accel_fn.checkpoint.run_state import (
    in_whole,
    named_steps,
    notes_of,
    prefix_of,
    put_back,
    run_state_of,
    scale_from_dict,
    scale_to_dict,
    targets_for,
    with_prefix,
)
from accel_fn.checkpoint.save import EXTRA
from accel_fn.checkpoint.schedules import (
    Choice,
    Match,
    ResumedSchedules,
    check_choices,
    of_other_optimizers,
)
from accel_fn.checkpoint.store import Run
from accel_fn.checkpoint.tensors import check_files, check_sizes, read_tensors
from accel_fn.core.collectives import agreed, all_or_none
from accel_fn.core.empty import note_filled
from accel_fn.core.mesh_axes import ranks_along
from accel_fn.core.plan import unwrapped
from accel_fn.core.restored import derive_random, in_train_mode, random_state, restore_random
from accel_fn.core.state import DistState, check_state, check_world, mesh_of
from accel_fn.core.step import Step
from accel_fn.errors import AccelError, CheckpointError, check_flag
from accel_fn.observe.progress import bytes_bar

_LOG = logging.getLogger(__name__)
_BY_NAMES = 'give match="names" to load into other groups of parameters'
_RANK_KEYS = {"buffers", "random"}


def load(
    step: Step | Mapping[str, Step],
    state: DistState,
    folder: str | os.PathLike[str],
    *,
    extras: Mapping[str, Any] | None = None,
    at: str | int = "latest",
    strict: bool = True,
    schedule: Choice = None,
    match: Match = "program",
) -> DistState:
    """Resume from a checkpoint. Called on every rank, of a world of any size.

    Build the program as for a new run; `load` fills its model, optimizer, transforms, extras
    and random generators in place. Everything is checked before anything is
    overwritten: each file against its hash, and the checkpoint against the program. Parameters that
    `save(only="trained")` left out, and frozen models, stay as the program has them, and must be those
    that were left out.

    Args:
        step: the step, or a dict of steps by name, as it was saved.
        state: as `build` returned it.
        folder: the folder that was given to `save`.
        extras: the objects by the names under which they were saved. If one has
            `differences_from(saved)`, as a sharded loader has, the lines that it returns are listed
            with all other differences. A dict is filled in place: saved keys overwrite, and other
            keys stay.
        at: "latest", the number of a step, or a checkpoint's name.
        strict: False: if the program differs, load the matching parts, keep the rest unchanged, and
            log the differences as a warning.
        schedule: the learning rates with which the run continues, if it was given another length.
            "saved": those of the checkpoint, with the lengths of its schedules. "program": `lr`,
            `initial_lr` and momentum (betas) of the program's optimizers, whose schedules are stepped to
            the saved update. Default: the saved ones, if lengths that schedulers know are equal. A
            function has no length: rates of a `LambdaLR` are computed for the saved update by the
            program's function, once extras are loaded, unless "program" computes them from the program's
            `initial_lr`, too. If the function gave another rate when the run was saved than the one in use,
            because it reads a value that the program had changed since, the saved rate stays.
        match: "names" to load into a program that differs in its parameters, in the groups of its optimizers
            or in its transforms, as after unfreezing or for a next phase: parts of the same name
            continue. Parameters and moments are matched by the parameter's name, optimizers by
            their class, transforms by slot and name. Settings of groups, such as weight decay, are
            the program's, and so are schedules, as with schedule="program"; one that follows a
            metric continues. The main rank logs, as a warning, what is new and what is left out.
            Tensors of one name and different shapes are refused, and so are the other differences
            that "program" refuses.

    Returns:
        The state: `state` with the checkpoint's `step`, `call`, `samples`, `items` and loss scale.

    Raises:
        RuntimeError: on every rank: there is no such checkpoint, a file is missing or damaged
            (it is named), or the program differs (all differences are listed, with both values), also
            in `total_steps`, `T_max`, `total_iters` or `milestones` of a schedule without `schedule`. With
            "program": a scheduler that follows a metric, ends before the saved update or is beyond it.
        ValueError: on every rank: an argument breaks its rule or differs between ranks.

    Law: the run continues as if it had not stopped: bit for bit in a world of the same size, to
    rounding in another. Tests: `tests/laws/law09_resuming.py`.

    Cost: each rank reads the data that it needs, and all ranks together read the checkpoint once
        more to check hashes. No memory for tensors that are on the host in their saved layout, else
        memory for the largest tensor for each thread that reads. A few small collectives.
        Parameters that a checkpoint leaves out are read once, each on one rank, to hash them. With
        schedule="program", two passes over all steps of the schedules on the host.

    >>> import tempfile, accel_fn as af
    >>> state, step = af.build(af.Plan(loss_fn, model, optimizer), af.DistState())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state, _ = step(state, batch)
    ...     path = af.save(step, state, folder)
    ...     af.load(step, state, folder).step
    1
    """
    check_state("load", state)
    check_world("load", state)
    began = perf_counter()
    steps, extras = named_steps(step), {} if extras is None else extras

    def check() -> None:
        checks.check_at(at, "load")
        check_choices("load", schedule, match)
        check_flag("load", "strict", strict)
        for each in steps.values():
            checks.check_plan(each.plan, "check_loaded")

    options = {"at": at, "strict": strict, "schedule": schedule, "match": match}
    home = checks.check_call("load", state, folder, steps, extras, check, **options)
    finish_writing(notes_of(steps), state, "load")
    path = agreed(lambda: _choose(home, at), state, "load")[0]

    extras = stateful(extras)
    with in_whole(steps, writes=True):
        loading = all_or_none(
            lambda: _Loading(path, steps, state, extras, strict, schedule, match), state, "load"
        )
        files = loading.manifest.files
        share = sorted(files)[state.rank :: state.world_size]
        all_or_none(lambda: loading.check_share(share), state, "load")
        here = compare.hashed(loading.frozen, state, {}, "load")
        all_or_none(lambda: loading.check_frozen(here), state, "load")
        with ExitStack() as undo:
            undo.callback(loading.undo)
            for stage in (loading.rehearse, loading.load_extras, loading.call_functions):
                all_or_none(partial(loading.run, stage), state, "load")
            undo.pop_all()
        loaded = all_or_none(loading.finish, state, "load")
    notes_of(steps).update(run=Run(loading.manifest.step), frozen=here)
    seconds = perf_counter() - began
    for observer in chain.from_iterable(each.observers.every for each in steps.values()):
        observer.loaded(loaded, seconds, path)
    return loaded


def _choose(folder: Path, at: str | int) -> Path:
    """Find the checkpoint. "latest" means the checkpoint of the highest step, even if it is damaged.

    `load` then reports the damage, instead of quietly going back to an older one.
    """
    with reading(folder, "load"):
        steps = steps_in(folder)
        if at == "latest" and steps:
            return folder / name_of(steps[-1])
        path = folder / (at if isinstance(at, str) else name_of(at))
        if path.is_dir():
            return path
    there = ", ".join(map(str, steps[-5:])) or "none"
    raise CheckpointError(f"load: at={at!r} must be a checkpoint in {folder}, got steps {there}")


class _Loading:
    """Loads one checkpoint into the running program, on one rank.

    Non-tensor state is loaded twice. The first time, `rehearse` finds values that do not fit, while
    the load can still be undone.
    """

    def __init__(
        self,
        path: Path,
        steps: Mapping[str, Step],
        state: DistState,
        extras: Mapping[str, Any],
        strict: bool,
        schedule: Choice,
        match: Match,
    ) -> None:
        self._before = run_state_of(steps)
        self._match = match
        checks.check_model(self._before.tensors, steps, "load")
        self._path, self._steps, self._state, self._extras = path, steps, state, extras
        self._strict, self._random = strict, random_state(state.device)
        self._training = [
            optimizer
            for each in steps.values()
            for optimizer in in_train_mode(each.plan.optimizers.values())
        ]
        self.manifest = read_manifest(path)
        check_sizes(path, self.manifest)
        self._same_mesh = self.manifest.mesh == mesh_of(state)
        # On the same mesh, each rank loads its own generators. On another mesh, ranks that have the
        # same place on dp must draw the same numbers, so each rank loads the generators of the
        # saved rank that had this place on dp, and place 0 on the other axes.
        self._places = ranks_along(self.manifest.mesh, "dp", 0)
        self._is_known = state.data.rank < len(self._places)
        number = self._places[state.data.rank] if self._is_known else 0
        if self._same_mesh:
            number = state.rank
        keys = {COMMON: COMMON_KEYS, file_of("rank", number, "pt"): _RANK_KEYS}
        check_files(path, self.manifest, keys)
        read = (dict_from_plain(path / name, keys[name], "load") for name in keys)
        self._common, self._of_rank = read
        self._extras_saved = with_prefix(EXTRA, self._of_rank)
        self.run(lambda: self._match_program(schedule))

    def run(self, stage: Callable[[], None]) -> None:
        """Run a stage of the load, and name the checkpoint in any error that it raises."""
        try:
            stage()
        except AccelError:
            raise
        except Exception as error:
            self._refuse([repr(error)], error)

    def _match_program(self, schedule: Choice) -> None:
        """Compare the checkpoint with the program, and choose the tensors and state to load."""
        steps, is_by_names = self._steps, self._match == "names"
        self._rests = self._common["steps"]
        if self.manifest.format == 1:
            self._rests = {name: renamed_rest(rest) for name, rest in self._rests.items()}
        self._compared, self._new = self._before, list[str]()
        if is_by_names:
            self._take_by_names()
        saved, moved = self._extras_saved, self._common.get("moved", ())
        self._schedules = ResumedSchedules(
            steps, self._rests, self._extras, saved, schedule, moved, by_names=is_by_names
        )
        # Transforms that strict=False leaves unchanged: a map from the prefix of their entries to
        # name and reason.
        self._fresh: dict[str, tuple[str, str]] = {}
        if not self._strict:
            for place, name in compare.misfits(self.manifest, self._compared).items():
                self._fresh[place] = name, "its state was saved in other shapes"
            for place, name in of_other_optimizers(steps, self._rests):
                self._fresh[place] = name, "it was saved for other optimizers"
        self._compare()
        self._choose()

    def _take_by_names(self) -> None:
        """Convert the checkpoint's state for this program: keep the parts whose names match."""
        here, saved = self._before, self.manifest
        entries = {**saved.entries, **saved.frozen}
        own = [name for name in here.tensors if compare.is_model(name)]
        names = {}
        for step in here.plans:
            parameters = unwrapped(self._steps[step].plan.model).named_parameters()
            prefix = prefix_of("model", step)
            names[step] = {name: name for name, _ in parameters if f"{prefix}{name}" in entries}
        if not any(name in entries for name in own):
            self._refuse(["no tensor of the model has a name that was saved"])
        run = OfRun(dict(saved.entries), dict(self._rests), dict(saved.plans))
        found = by_names(run, here, self._steps, names)
        # Drop frozen parameters that the program does not have: there is nothing to compare them
        # with.
        left_out = {n: each for n, each in saved.frozen.items() if n in here.tensors | here.frozen}
        tied = {n: first for n, first in saved.tied.items() if n in here.tied}
        begin = [name for name in own if name not in entries]
        found.new += [f"{name}: begins with the program's values" for name in begin]
        self.manifest = replace(
            saved, entries=found.entries, plans=found.plans, frozen=left_out, tied=tied
        )
        self._rests, self._new = found.rests, found.new
        compared = without_new(here, {**found.entries, **left_out})
        known = {name: first for name, first in here.tied.items() if name in saved.tied}
        self._compared = replace(compared, tied=known)

    def _compare(self) -> None:
        """Compare checkpoint and program; raise if they differ, or with strict=False log how."""
        manifest, before = self.manifest, self._compared
        self._refuse([*self._schedules.obstacles()])
        found = [f"{name} starts fresh: {reason}" for name, reason in self._fresh.values()]
        found += compare.differences(manifest, self._rests, before, self._state)
        found += compare.extra_differences(self._extras_saved, self._extras)
        found += self._schedules.differences()
        found = [
            f"{line}; {_BY_NAMES}" if " groups" in line.split(":")[0] else line for line in found
        ]
        if self._strict:
            self._refuse(found)
        elif found and self._state.is_main:
            _LOG.warning("%s is of another program:\n%s", self._path, compare.listed(found))
        if self._new and self._state.is_main:
            text = "%s is loaded by names; all else goes on, but:\n%s"
            _LOG.warning(text, self._path, compare.listed(self._new))

    def _choose(self) -> None:
        """Choose the tensors to fill and the state to load; with strict=False, only those that fit."""
        manifest, before = self.manifest, self._before
        fits = compare.fitting(manifest.entries, before)
        self.frozen = compare.fitting(manifest.frozen, before)
        specs = {
            name: (getattr(torch, entry.dtype), entry.shape)
            for name, entry in manifest.entries.items()
            if not name.startswith(tuple(self._fresh))
        }
        self._tensors, self._options = dict(fits), {}
        for name in self._steps.keys() & manifest.plans.keys():
            plan = self._steps[name].plan
            optimizers = [
                optimizer
                for optimizer in plan.optimizers
                if self._strict
                or compare.has_optimizer(manifest, before, {**fits, **self.frozen}, name, optimizer)
            ]
            self._options[name] = {"optimizers": optimizers, "fresh": self._fresh}
            for kind in ["transforms", *optimizers]:
                self._tensors |= targets_for(kind, plan, name, before.tensors, specs)
        buffers = self._of_rank["buffers"]
        names = self._tensors.keys() & buffers.keys() & set(before.buffers)
        # Buffers that differ from rank 0's are saved for each rank. Load them on the same mesh only. On
        # another mesh, every rank keeps rank 0's buffers, which were read with the model.
        self._buffers = {name: buffers[name] for name in names if self._same_mesh}

    def check_share(self, names: Sequence[str]) -> None:
        total = sum(self.manifest.files[name].size for name in names)
        with bytes_bar("check", total, is_main=self._state.is_main) as count:
            check_files(self._path, self.manifest, names, count)

    def check_frozen(self, here: Mapping[str, compare.Hashed]) -> None:
        try:
            compare.check_loaded(self._path, self.manifest.frozen, here)
        except CheckpointError as error:
            if self._strict:
                raise
            if self._state.is_main:
                _LOG.warning("%s", str(error).removeprefix("load: "))

    def rehearse(self) -> None:
        """Load the non-tensor state; refuse values of other types or sizes than the program's."""
        scalers = self._put_back(calls=False).scaler, self._state.scaler
        scale, scale_here = map(scale_to_dict, scalers)
        here = {name: self._tensors[name] for name in self._buffers}
        found = [*compare.unlike(self._buffers, here, "buffers")]
        found += compare.unlike(scale, scale_here, "scaler")
        found += compare.unlike_rests(run_state_of(self._steps).rest, self._before.rest)
        self._refuse(found)

    def load_extras(self) -> None:
        for name in compare.fitting_extras(self._extras_saved, self._extras):
            self._extras[name].load_state_dict(self._extras_saved[name])

    def call_functions(self) -> None:
        """Call schedule functions, which may read extras, while the load can still be undone."""
        self._schedules.follow(self._position())

    def finish(self) -> DistState:
        total = sum(each.nbytes for each in self._tensors.values())
        with bytes_bar("load", total, is_main=self._state.is_main) as count:
            read_tensors(self._path, self._tensors, self.manifest.entries, count)
        for name, buffer in self._buffers.items():
            self._tensors[name].copy_(buffer)
        for name, step in self._steps.items():
            note_filled(step.plan.model, with_prefix(prefix_of("model", name), self._tensors))
        if self._state.is_main and self._state.data.world_size > len(self._places):
            _LOG.warning(
                "ranks that share a batch: %d when saved, %d now; random generators of the new ranks are "
                "derived from seed, rank and step",
                len(self._places),
                self._state.data.world_size,
            )
        loaded = self._put_back(again=True)
        # Some optimizers have a train and an eval mode. A checkpoint holds the values of the eval
        # mode, so switch those that were in train mode back to it.
        for optimizer in self._training:
            optimizer.train()
        return loaded

    def undo(self) -> None:
        self._schedules.undo()
        for name, step in self._steps.items():
            rest, optimizers = self._before.rest[name], [*step.plan.optimizers]
            tensors = self._before.tensors
            put_back(step, name, tensors, rest, optimizers=optimizers, fresh=())
        restore_random(self._random, self._state.device)

    def _position(self) -> DistState:
        """Return the program's `DistState` with the checkpoint's counts and loss scale."""
        saved, state = self.manifest, self._state
        scaler = state.scaler and (scale_from_dict(self._common["scaler"], state) or state.scaler)
        return replace(
            state,
            step=saved.step,
            call=saved.call,
            samples=saved.samples,
            items=saved.items,
            scaler=scaler,
        )

    def _put_back(self, *, calls: bool = True, again: bool = False) -> DistState:
        """Load the saved non-tensor state, together with the current tensors; return `_position()`."""
        state, loaded = self._state, self._position()
        for name, options in self._options.items():
            step = self._steps[name]
            put_back(step, name, self._tensors, dict(self._rests[name]), **options, again=again)
        self._schedules.follow(loaded, calls=calls)
        if self._is_known:
            restore_random(self._of_rank["random"], state.device)
        else:
            derive_random(loaded)
        return loaded

    def _refuse(self, found: list[str], error: Exception | None = None) -> None:
        if found:
            raise CheckpointError(
                f"load: {self._path} must be of this program, got differences:\n{compare.listed(found)}"
            ) from error


def resume(
    step: Step | Mapping[str, Step],
    state: DistState,
    folder: str | os.PathLike[str],
    extras: Mapping[str, Any] | None = None,
    *,
    schedule: Choice = None,
    match: Match = "program",
) -> DistState:
    """Load the newest checkpoint of a folder; return the state itself if there is none.

    Called on every rank, of a world of any size. Rank 0 looks for checkpoints, so all ranks
    load, or none. The main rank logs the checkpoint and its step, as a warning, which Python
    shows by default. The next line of a program is `loader.epochs(num_epochs, since=state)`: if the
    run has finished, it yields no epoch and logs that.

    Args:
        step: the step, or a dict of steps by name, as it is saved.
        state: as `build` returned it.
        folder: the folder that is given to `save`; it need not exist.
        extras: the objects by the names under which they are saved, with the loader among them.
        schedule: as for `load`: "program" or "saved" for a run that continues with more epochs.
        match: as for `load`: "names" for a program with other parameters, groups or transforms.

    Returns:
        The state that `load` returns, or `state`.

    Raises:
        RuntimeError: on every rank, as in `load`: the newest checkpoint is damaged, or the program differs.
        ValueError: on every rank: an argument breaks its rule or differs between ranks, in a new run too.

    Cost: a few small collectives, and `load` where there is a checkpoint.

    >>> import tempfile, accel_fn as af
    >>> state, step = af.build(af.Plan(loss_fn, model, optimizer), af.DistState())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = af.resume(step, state, folder)  # a new run: step 0
    ...     state, _ = step(state, batch)
    ...     path = af.save(step, state, folder)
    ...     af.resume(step, state, folder).step
    1
    """
    check_state("resume", state)
    check_world("resume", state)
    steps, given = named_steps(step), {} if extras is None else extras
    check = partial(check_choices, "resume", schedule, match)
    choices = {"schedule": schedule, "match": match}
    home = checks.check_call("resume", state, folder, steps, given, check, **choices)

    def find() -> list[int]:
        with reading(home, "resume"):
            return steps_in(home)

    found = agreed(find, state, "resume")[0]
    if not found:
        return state
    loaded = load(step, state, folder, extras=extras, schedule=schedule, match=match)
    if state.is_main:
        call = f", call {loaded.call}" if loaded.call else ""
        checkpoint = home / name_of(loaded.step)
        _LOG.warning("the run resumes at step %d%s, from %s", loaded.step, call, checkpoint)
    return loaded
