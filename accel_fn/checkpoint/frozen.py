"""Frozen parameters and models, which a checkpoint leaves out: which they are, and their hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from accel_fn.checkpoint.compare import is_frozen
from accel_fn.checkpoint.format.hashing import hash_of_tensor
from accel_fn.checkpoint.format.manifest import FrozenEntry
from accel_fn.checkpoint.run_state import RunState, Steps, prefix_of
from accel_fn.core.collectives import all_or_none
from accel_fn.core.dtensor import local, whole
from accel_fn.core.plan import unwrapped
from accel_fn.core.primitives import exchange
from accel_fn.core.state import DistState
from accel_fn.errors import ArgumentError, CheckpointError

_SAMPLE, _MOST_SHOWN = 64, 3


class Hashed(NamedTuple):
    """A hash of a whole parameter, and a mark of this rank's part that shows whether it has changed."""

    hash: str
    mark: tuple[int, str]


def take_frozen(contents: RunState, steps: Steps) -> dict[str, Tensor]:
    """Take the parameters out of the contents that no step of the run trains, or has trained."""
    trained = set[int]().union(*(each.strategy.parameters.required for each in steps.values()))
    return {
        name: contents.tensors.pop(name)
        for step, each in steps.items()
        for key, parameter in unwrapped(each.plan.model).named_parameters()
        if not parameter.requires_grad and id(parameter) not in trained
        if (name := f"{prefix_of('model', step)}{key}") in contents.tensors
    }


def hashed(
    tensors: Mapping[str, Tensor], state: DistState, known: Mapping[str, Hashed], function: str
) -> dict[str, Hashed]:
    """Hash whole tensors, each on one rank; those that have their mark of before are not read again.

    Cost: a small collective, and for what is read, a gather of each shard and two more.
    """
    marks = all_or_none(lambda: {n: _mark(each) for n, each in tensors.items()}, state, function)
    new = [name for name in tensors if name not in known or known[name].mark != marks[name]]
    news = {name for names in exchange(new, state, function) for name in names}
    hashes = {name: each.hash for name, each in known.items()}
    if news:
        hashes |= _hashes({n: each for n, each in tensors.items() if n in news}, state, function)
    return {name: Hashed(hashes[name], mark) for name, mark in marks.items()}


def check_unchanged(before: Mapping[str, Hashed], found: Mapping[str, Hashed]) -> None:
    """Refuse parameters that are frozen, and which the loop itself moves, as a teacher's."""
    changed = [n for n in found if n in before and found[n].hash != before[n].hash]
    models = [name for name in changed if is_frozen(name)]
    if models:
        raise ArgumentError(
            "save: frozen models must stay as they are, since a checkpoint does not hold them, got a change "
            f"since they were last saved or loaded in {_listed(models)}; make a model that moves a part of "
            "Plan's model, or leave it out of frozen and put it into extras"
        )
    if changed:
        raise ArgumentError(
            'save: only="trained" must leave out parameters that stay as they are, got a change since '
            f"they were last saved or loaded in {_listed(changed)}; save without only"
        )


def check_loaded(path: Path, saved: Mapping[str, FrozenEntry], here: Mapping[str, Hashed]) -> None:
    """Refuse a program whose frozen parameters are not those that a checkpoint left out."""
    changed = [name for name in here if here[name].hash != saved[name].hash]
    if changed:
        raise CheckpointError(
            f"load: {path} leaves out frozen parameters, which the program must have as they were saved, "
            f"got other values in {_listed(changed)}; give each model the weights that training began with, "
            "then load"
        )


def _mark(tensor: Tensor) -> tuple[int, str]:
    """Mark a tensor by its version and a few elements: writes through `.data` keep the version."""
    held = local(tensor).detach()
    few = held.flatten()[:: max(1, held.numel() // _SAMPLE)]
    return held._version, hash_of_tensor(few)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _hashes(tensors: Mapping[str, Tensor], state: DistState, function: str) -> dict[str, str]:
    own: dict[str, str] = {}
    failures: list[Exception] = []
    for number, (name, tensor) in enumerate(tensors.items()):
        gathered = whole(tensor)
        if number % state.world_size == state.rank:
            try:
                own[name] = hash_of_tensor(gathered)
            # Not raised at once: other ranks wait in the next gather.
            except Exception as error:
                failures.append(error)

    def finish() -> dict[str, str]:
        if failures:
            raise failures[0]
        return own

    every = exchange(all_or_none(finish, state, function), state, function)
    return {name: each for hashes in every for name, each in hashes.items()}
