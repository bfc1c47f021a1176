"""Checks of the arguments of save and load, on this rank and between ranks."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_fn.checkpoint.compare import is_model
from accel_fn.checkpoint.manifest import LONGEST_NAME
from accel_fn.checkpoint.names import is_name
from accel_fn.checkpoint.run_state import is_expanded, prefix_of, with_prefix
from accel_fn.core.collectives import agreed
from accel_fn.core.dtensor import is_sharded, local
from accel_fn.core.plan import Plan
from accel_fn.core.state import DistState
from accel_fn.core.step import Step
from accel_fn.errors import (
    UNPRINTABLE,
    ArgumentError,
    ArgumentTypeError,
    check_equal,
    check_folder,
    message,
)
from accel_fn.names import CALLS


def check_filled(steps: Mapping[str, Step], function: str) -> None:
    """Raise on every rank if `empty` made a step's model, and some tensors of it still lack values."""
    for step in steps.values():
        step.check_filled(function)


def check_call(
    function: str,
    state: DistState,
    folder: str | os.PathLike[str],
    steps: Mapping[str, Step],
    extras: Mapping[str, Any],
    check_others: Callable[[], None] = lambda: None,
    **others: object,
) -> Path:
    """Refuse arguments that break their rule, or differ between ranks; return the folder's path.

    Cost: one small collective.
    """

    def check() -> dict[str, str]:
        check_steps(steps, function)
        path = check_folder(function, folder)
        check_extras(extras, function)
        check_others()
        given = {"folder": str(path), "step": sorted(steps), "extras": sorted(extras)}
        return {name: repr(value) for name, value in (given | others).items()}

    ranks = agreed(check, state, function)
    for name in ranks[state.rank]:
        rule = f"{function}: {name} must be the same on every rank"
        check_equal([each[name] for each in ranks], rule, error=ArgumentError)
    return check_folder(function, folder)


def check_steps(steps: Mapping[str, Step], function: str) -> None:
    values = list(steps.values()) if isinstance(steps, Mapping) else []
    if not values or not all(isinstance(each, Step) for each in values):
        repair = f"the call is {CALLS[function]}"
        raise ArgumentTypeError(
            message(function, "step", "be a Step or a dict of Steps", steps, repair)
        )
    for name in steps:
        if not isinstance(name, str) or "/" in name:
            rule = "have names that are text without /"
            raise ArgumentError(message(function, "step", rule, name))


def check_model(tensors: Mapping[str, Tensor], steps: Mapping[str, Step], function: str) -> None:
    """Refuse names that no manifest may hold, expanded tensors, and plain tensors that hold a rank's part."""
    for name, tensor in tensors.items():
        if len(name) > LONGEST_NAME or UNPRINTABLE.search(name):
            rule = f"name its tensors by at most {LONGEST_NAME} characters that can be printed"
            raise ArgumentError(message(function, "step", rule, name))
        shard = local(tensor)
        if is_model(name) and is_expanded(shard):
            raise ArgumentError(
                f"{function}: step must hold tensors of the model that can be written, none that was "
                f"expanded, got strides {shard.stride()} for {name!r}; clone it"
            )
    for step_name, step in steps.items():
        own = with_prefix(prefix_of("model", step_name), tensors)
        for name, place in step.strategy.placements(own).items():
            if place and name in own and not is_sharded(own[name]):
                raise ArgumentError(
                    f"{function}: step must hold tensors of the model whole or as DTensors, got a plain "
                    f"part of {name!r} on each rank by {type(step.strategy).__name__}; hold parts as "
                    "DTensors on af.device_mesh(state)"
                )


def check_at(at: str | int, function: str) -> None:
    is_number = isinstance(at, numbers.Integral) and not isinstance(at, bool) and at >= 0
    if not is_number and not (isinstance(at, str) and is_name(at)):
        rule = 'be "latest", the number of a step or the name of a checkpoint'
        repair = "give its path as folder" if isinstance(at, str | os.PathLike) else ""
        raise ArgumentTypeError(message(function, "at", rule, at, repair))


def check_plan(plan: Plan, method: str) -> None:
    for function in plan.entries():
        # The method, such as `check_saved`, raises if the function cannot be saved or loaded now.
        getattr(function, method, lambda: None)()


def check_extras(extras: Mapping[str, Any], function: str) -> None:
    if not isinstance(extras, Mapping) or not all(isinstance(name, str) for name in extras):
        raise ArgumentTypeError(message(function, "extras", "be a dict, by names", extras))
    for name, extra in extras.items():
        if not _has_state(extra) and not isinstance(extra, dict | torch.Generator):
            rule = "have state_dict and load_state_dict, or be a dict or a torch.Generator"
            raise ArgumentTypeError(message(function, f"extras[{name!r}]", rule, extra))


def stateful(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Wrap dicts and generators in objects with a `state_dict`; keep other extras."""
    found = {}
    for name, extra in extras.items():
        if not _has_state(extra):
            extra = _Generator(extra) if isinstance(extra, torch.Generator) else _Dict(extra)
        found[name] = extra
    return found


def _has_state(extra: object) -> bool:
    return hasattr(extra, "state_dict") and hasattr(extra, "load_state_dict")


class _Dict:
    def __init__(self, values: dict[Any, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[Any, Any]:
        return dict(self._values)

    def load_state_dict(self, saved: Mapping[Any, Any]) -> None:
        """Overwrite the values of the saved keys; the dict's other keys stay.

        A saved tensor moves to the device of the tensor that it replaces.
        """
        for key, value in saved.items():
            here: Any = self._values.get(key)
            is_moved = isinstance(value, Tensor) and isinstance(here, Tensor)
            self._values[key] = value.to(here.device) if is_moved else value


class _Generator:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Tensor]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        self._generator.set_state(saved["state"])
