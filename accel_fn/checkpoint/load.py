"""load: resume a run from a checkpoint, at any world size."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from accel_fn.base.rng import derive_random, restore_random
from accel_fn.base.state import DistState, check_state
from accel_fn.checkpoint import argument_checks as checks
from accel_fn.checkpoint import compare
from accel_fn.checkpoint.background import finish_writing
from accel_fn.checkpoint.format.manifest import Manifest, read_manifest
from accel_fn.checkpoint.format.names import COMMON, COMMON_KEYS, file_of, name_of, steps_in
from accel_fn.checkpoint.format.plain_data import dict_from_plain
from accel_fn.checkpoint.format.read import check_files, check_sizes, read_tensors
from accel_fn.checkpoint.save import EXTRA
from accel_fn.comm.collectives import all_or_none
from accel_fn.comm.primitives import exchange
from accel_fn.errors import CheckpointError, check_flag, check_folder
from accel_fn.step.contents import (
    Contents,
    contents_of,
    named_steps,
    notes_of,
    put_back,
    scale_from_dict,
    targets_for,
    under,
)
from accel_fn.step.step import Step

_LOG = logging.getLogger(__name__)
_RANK_KEYS = {"buffers", "random"}


def load(
    folder: str | os.PathLike[str],
    state: DistState,
    step: Step | Mapping[str, Step],
    *,
    extras: Mapping[str, Any] | None = None,
    at: str | int = "latest",
    strict: bool = True,
) -> DistState:
    """Resume from a checkpoint. Called on every rank, of a world of any size.

    The program is built as for a new run; then its model, optimizer, transforms, extras
    and random generators are filled in place. Everything is checked before anything is
    overwritten: each file against its hash, and the checkpoint against the program.

    Args:
        folder: that was given to `save`.
        state: as `build` returned it.
        step: the step, or a dict of steps by name, as it was saved.
        extras: by the names that they were saved under. If one has `differences_from(saved)`, as a
            sharded loader has, the lines that it returns are listed with all other differences.
        at: "latest", the number of a step, or a checkpoint's name.
        strict: False: if the program differs, fill what fits, leave the rest as
            it is, and log the differences as a warning.

    Returns:
        The state: `state` with the checkpoint's `step` and loss scale.

    Raises:
        RuntimeError: on every rank: there is no such checkpoint, a file is missing or damaged
            (it is named), or the program differs (all differences are listed, with both values).
        ValueError: on every rank: an argument breaks its rule or differs between ranks.

    Cost: reads the checkpoint, each rank what it needs, and together once more to check
        hashes; no memory for tensors that lie on the host as they were saved, else that of the
        largest for each thread that reads; a few small collectives.

    >>> import tempfile, accel_fn as af
    >>> state, step = af.build(af.DistState(), af.Plan(loss_fn, model, optimizer))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state, _ = step(state, batch)
    ...     path = af.save(folder, state, step)
    ...     af.load(folder, state, step).step
    1
    """
    check_state("load", state)
    steps, extras = named_steps(step), {} if extras is None else extras

    def check_arguments() -> None:
        check_folder("load", folder)
        checks.check_steps(steps, "load")
        checks.check_extras(extras, "load")
        checks.check_at(at, "load")
        check_flag("load", "strict", strict)
        for each in steps.values():
            checks.check_plan(each.plan, "check_loaded")

    all_or_none(check_arguments, state, "load")
    given = {"folder": os.fspath(folder), "step": sorted(steps), "extras": sorted(extras)}
    checks.check_same(given | {"at": at, "strict": strict}, state, "load")
    finish_writing(notes_of(steps), state, "load")
    path = all_or_none(lambda: _choose(Path(folder), at), state, "load")
    path = exchange(path, state, "load")[0]

    def read_and_compare() -> _Saved:
        contents = contents_of(steps)
        checks.check_model(contents.tensors, "load")
        saved = _read(path, contents, state)
        _compare(saved, extras, state, strict=strict)
        return saved

    saved = all_or_none(read_and_compare, state, "load")
    files = saved.manifest.files
    share = sorted(files)[state.rank :: state.world_size]
    all_or_none(lambda: check_files(path, saved.manifest, share), state, "load")

    def load_extras() -> None:
        for name in compare.fitting_extras(saved.extras, extras):
            extras[name].load_state_dict(saved.extras[name])

    all_or_none(load_extras, state, "load")
    loaded = all_or_none(lambda: _fill(saved, steps, state, strict=strict), state, "load")
    notes_of(steps)["resumed_from"] = saved.manifest.step
    return loaded


@dataclass(frozen=True, slots=True)
class _Saved:
    """What was saved but its tensors, as a rank has read it, and what the program holds."""

    path: Path
    manifest: Manifest
    contents: Contents
    common: dict[str, Any]
    of_rank: dict[str, Any]
    """Of this rank; of rank 0 if the saved run did not have this one."""

    @property
    def extras(self) -> dict[str, Any]:
        """Extras by name."""
        return under(EXTRA, self.of_rank)


def _choose(folder: Path, at: str | int) -> Path:
    """Find the checkpoint; "latest" is the highest name, so that a damaged one is not skipped."""
    steps = steps_in(folder)
    if at == "latest" and steps:
        return folder / name_of(steps[-1])
    path = folder / (at if isinstance(at, str) else name_of(at))
    if path.is_dir():
        return path
    there = ", ".join(map(str, steps[-5:])) or "none"
    raise CheckpointError(f"load: at={at!r} must be a checkpoint in {folder}, got steps {there}")


def _read(path: Path, contents: Contents, state: DistState) -> _Saved:
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    number = state.rank if state.rank < manifest.world_size else 0
    keys = {COMMON: COMMON_KEYS, file_of("rank", number, "pt"): _RANK_KEYS}
    check_files(path, manifest, keys)
    common, of_rank = (dict_from_plain(path / name, keys[name], "load") for name in keys)
    return _Saved(path, manifest, contents, common, of_rank)


def _compare(saved: _Saved, extras: Mapping[str, Any], state: DistState, *, strict: bool) -> None:
    found = []
    if not strict:
        found = [
            f"{function} starts fresh: its state was saved in other shapes"
            for function in compare.misfits(saved.manifest, saved.contents).values()
        ]
    found += compare.differences(saved.manifest, saved.contents, state)
    found += compare.extra_state_differences(saved.common["steps"], saved.contents.rest)
    found += compare.extra_differences(saved.extras, extras)
    if found and strict:
        raise CheckpointError(
            f"load: {saved.path} must be of this program, got differences:\n{compare.listed(found)}"
        )
    if found and state.is_main:
        _LOG.warning("%s is of another program:\n%s", saved.path, compare.listed(found))


def _fill(saved: _Saved, steps: Mapping[str, Step], state: DistState, *, strict: bool) -> DistState:
    """Overwrite what fits: all of it, if `strict`."""
    manifest, contents, of_rank = saved.manifest, saved.contents, saved.of_rank
    fits = compare.fitting(manifest, contents)
    fresh = {} if strict else compare.misfits(manifest, contents)
    specs = {
        name: (getattr(torch, entry.dtype), entry.shape)
        for name, entry in manifest.entries.items()
        if not name.startswith(tuple(fresh))
    }
    optimizers, tensors = {}, dict(fits)
    for name, each in steps.items():
        optimizers[name] = [
            optimizer
            for optimizer in each.plan.optimizers
            if strict or compare.has_optimizer(manifest, contents, fits, name, optimizer)
        ]
        for kind in ["transforms", *optimizers[name]]:
            tensors |= targets_for(kind, each.plan, name, contents.tensors, specs)
    read_tensors(saved.path, tensors, manifest.entries)
    if manifest.world_size == state.world_size:
        for name in of_rank["buffers"].keys() & tensors.keys():
            tensors[name].copy_(of_rank["buffers"][name])
    for name in steps.keys() & saved.common["steps"].keys():
        rest = saved.common["steps"][name]
        put_back(steps[name].plan, name, tensors, rest, optimizers=optimizers[name], fresh=fresh)
    scaler = state.scaler and (scale_from_dict(saved.common["scaler"], state) or state.scaler)
    loaded = replace(state, step=manifest.step, scaler=scaler)
    _load_random(of_rank, manifest, loaded)
    return loaded


def _load_random(of_rank: Mapping[str, Any], manifest: Manifest, state: DistState) -> None:
    if state.rank < manifest.world_size:
        restore_random(of_rank["random"], state.device)
    else:
        derive_random(state)
    if state.is_main and state.world_size > manifest.world_size:
        _LOG.warning(
            "saved in a world of %d, loaded in one of %d: random generators of the new ranks are "
            "derived from seed, rank and step",
            manifest.world_size,
            state.world_size,
        )
