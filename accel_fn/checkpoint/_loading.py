"""load: a run goes on from a checkpoint, at any world size."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_fn._collectives import all_or_none
from accel_fn._comm import exchange
from accel_fn._errors import CheckpointError
from accel_fn._random import derive_random, restore_random
from accel_fn._state import DistState
from accel_fn._step import Step
from accel_fn.checkpoint._background import finish_writing
from accel_fn.checkpoint._comparing import differences, fitting, has_optimizer, listed
from accel_fn.checkpoint._contents import (
    Contents,
    contents_of,
    named_steps,
    notes_of,
    put_back,
    room_for,
    scale_from_dict,
)
from accel_fn.checkpoint._listing import check_sizes
from accel_fn.checkpoint._manifest import Manifest, read_manifest
from accel_fn.checkpoint._naming import file_of, name_of, steps_in
from accel_fn.checkpoint._plain import from_plain
from accel_fn.checkpoint._reading import check_files, read_tensors
from accel_fn.checkpoint._saving import COMMON, EXTRA, check_extras, check_steps


def load(
    folder: str | os.PathLike[str],
    state: DistState,
    step: Step | Mapping[str, Step],
    *,
    extras: Mapping[str, Any] | None = None,
    at: str | int = "latest",
    strict: bool = True,
) -> DistState:
    """Go on from a checkpoint. Called on every rank, of a world of any size.

    The program is built as for a new run; then its model, optimizer, transforms, extras
    and random generators are filled in place. Everything is checked before anything is
    overwritten: each file against its hash, and the checkpoint against the program.

    Args:
        folder: that was given to `save`.
        state: as `build` gave it.
        step: the step, or a dict of steps by name, as it was saved.
        extras: by the names that they were saved under.
        at: "latest", the number of a step, or a checkpoint's name.
        strict: False: where the program is another one, fill what fits, leave the rest as
            it is, and say on stderr what that is.

    Returns:
        The state: `state` with the checkpoint's `step` and loss scale.

    Raises:
        RuntimeError: on every rank: there is no such checkpoint, a file is missing or damaged
            (it is named), or the program is another one (each difference is listed,
            with both values).
        ValueError: on every rank, extras cannot take anything back.

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
    steps, extras = named_steps(step), extras or {}
    all_or_none(lambda: check_steps(steps, "load"), state, "load")
    finish_writing(notes_of(steps), state, "load")
    path = all_or_none(lambda: _choose(Path(folder), at, extras), state, "load")
    path = exchange(path, state, "load")[0]

    def check() -> tuple[Manifest, Contents]:
        manifest, contents = read_manifest(path), contents_of(steps)
        check_sizes(path, manifest)
        _compare(path, manifest, contents, state, strict=strict)
        return manifest, contents

    manifest, contents = all_or_none(check, state, "load")
    share = sorted(manifest.files)[state.rank :: state.world_size]
    all_or_none(lambda: check_files(path, manifest, share), state, "load")
    loaded = all_or_none(
        lambda: _fill(path, manifest, contents, steps, extras, state, strict=strict), state, "load"
    )
    notes_of(steps)["resumed_from"] = manifest.step
    return loaded


def _choose(folder: Path, at: str | int, extras: Mapping[str, Any]) -> Path:
    """The checkpoint that is meant; the newest by name, so that a damaged one is not passed over."""
    check_extras(extras, "load")
    steps = steps_in(folder)
    if at == "latest" and steps:
        return folder / name_of(steps[-1])
    path = folder / (name_of(at) if isinstance(at, int) else at)
    if path.is_dir():
        return path
    there = ", ".join(map(str, steps[-5:])) or "none"
    raise CheckpointError(f"load: at={at!r} must be a checkpoint in {folder}, got steps {there}")


def _compare(
    path: Path, manifest: Manifest, contents: Contents, state: DistState, *, strict: bool
) -> None:
    found = differences(manifest, contents, state)
    if found and strict:
        raise CheckpointError(
            f"load: {path} must be of this program, got differences:\n{listed(found)}"
        )
    if found and state.is_main:
        print(f"accel_fn: {path} is of another program:\n{listed(found)}", file=sys.stderr)


def _fill(
    path: Path,
    manifest: Manifest,
    contents: Contents,
    steps: Mapping[str, Step],
    extras: Mapping[str, Any],
    state: DistState,
    *,
    strict: bool,
) -> DistState:
    """Overwrite: what may refuse comes first."""
    rest = from_plain(path / COMMON, "load")
    was_there = state.rank < manifest.world_size
    mine = from_plain(path / file_of("rank", state.rank if was_there else 0, "pt"), "load")
    _load_extras(mine, extras, strict=strict)
    fits = fitting(manifest, contents)
    optimizers = {name for name in steps if has_optimizer(manifest, contents, fits, name)}
    tensors = dict(fits)
    for name, each in steps.items():
        for kind in ["transforms", "optimizer"] if name in optimizers else ["transforms"]:
            tensors |= room_for(kind, each.plan, name, contents.tensors, manifest.entries)
    read_tensors(path, tensors, manifest.entries)
    if manifest.world_size == state.world_size:
        for name in mine["buffers"].keys() & tensors.keys():
            tensors[name].copy_(mine["buffers"][name])
    for name in steps.keys() & rest["steps"].keys():
        saved = rest["steps"][name]
        put_back(steps[name].plan, name, tensors, saved, optimizer=name in optimizers)
    scaler = state.scaler and (scale_from_dict(rest["scaler"], state) or state.scaler)
    loaded = replace(state, step=manifest.step, scaler=scaler)
    _load_random(mine, manifest, loaded, was_there=was_there)
    return loaded


def _load_extras(mine: Mapping[str, Any], extras: Mapping[str, Any], *, strict: bool) -> None:
    saved = sorted(name.removeprefix(EXTRA) for name in mine if name.startswith(EXTRA))
    if strict and saved != sorted(extras):
        raise CheckpointError(
            f"load: extras must be those that were saved, {saved}, got {sorted(extras)}"
        )
    for name, extra in extras.items():
        if name in saved:
            extra.load_state_dict(mine[f"{EXTRA}{name}"])


def _load_random(
    mine: Mapping[str, Any], manifest: Manifest, state: DistState, *, was_there: bool
) -> None:
    if was_there:
        restore_random(mine["random"], state.device)
    else:
        derive_random(state)
    if state.is_main and state.world_size > manifest.world_size:
        print(
            f"accel_fn: saved by {manifest.world_size} ranks, loaded by {state.world_size}: random "
            "generators of the new ranks are derived from seed, rank and step",
            file=sys.stderr,
        )
