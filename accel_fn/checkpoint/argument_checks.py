"""What save and load are given: refused where it breaks a rule, or is another on another rank."""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from accel_fn.base.state import DistState
from accel_fn.checkpoint.compare import is_model
from accel_fn.checkpoint.format.names import is_name
from accel_fn.comm.dtensor import local
from accel_fn.comm.primitives import exchange
from accel_fn.errors import ArgumentError, ArgumentTypeError, check_alike, check_count, message
from accel_fn.step.plan import Plan, slot_names
from accel_fn.step.step import Step


def check_steps(steps: Mapping[str, Step], function: str) -> None:
    """There must be one, and names that the names of entries can hold."""
    if not (
        isinstance(steps, Mapping)
        and steps
        and all(isinstance(each, Step) for each in steps.values())
    ):
        raise ArgumentTypeError(message(function, "step", "be a Step or a dict of Steps", steps))
    for name in steps:
        if not isinstance(name, str) or "/" in name:
            raise ArgumentError(
                message(function, "step", "have names that are text without /", name)
            )


def check_model(tensors: Mapping[str, Tensor], function: str) -> None:
    """Each element must have a place of its own, in which it can be read back."""
    for name, tensor in tensors.items():
        held = local(tensor)
        if is_model(name) and any(
            not step and size > 1 for size, step in zip(held.shape, held.stride(), strict=True)
        ):
            raise ArgumentError(
                f"{function}: step must hold tensors of the model that can be written, none that was "
                f"expanded, got strides {held.stride()} for {name!r}; clone it"
            )


def check_extras(extras: Mapping[str, Any], function: str) -> None:
    """They must be able to say what they keep, and to take it back."""
    if not isinstance(extras, Mapping) or not all(isinstance(name, str) for name in extras):
        raise ArgumentTypeError(message(function, "extras", "be a dict, by names", extras))
    for name, extra in extras.items():
        if not (hasattr(extra, "state_dict") and hasattr(extra, "load_state_dict")):
            raise ArgumentTypeError(
                message(function, f"extras[{name!r}]", "have state_dict and load_state_dict", extra)
            )


def check_keep(keep: int | None, keep_every: int | None, function: str) -> None:
    """They must be counts, where they are given."""
    for name, count in (("keep", keep), ("keep_every", keep_every)):
        if count is not None:
            check_count(function, name, count)


def check_at(at: str | int, function: str) -> None:
    """It must say which checkpoint, and lead nowhere else."""
    is_number = isinstance(at, numbers.Integral) and not isinstance(at, bool) and at >= 0
    if not is_number and not (isinstance(at, str) and is_name(at)):
        rule = 'be "latest", the number of a step or the name of a checkpoint'
        repair = "folder says where it is" if isinstance(at, str | os.PathLike) else ""
        raise ArgumentTypeError(message(function, "at", rule, at, repair))


def ask_plan(plan: Plan, question: str) -> None:
    """Let what keeps something refuse to be saved, or loaded, just now: by its method of that name."""
    for part in (part for slot in slot_names() for part in getattr(plan, slot)):
        refuse = getattr(part, question, None)
        if refuse is not None:
            refuse()


def check_same(given: Mapping[str, object], state: DistState, function: str) -> None:
    """Refuse on every rank what one rank alone was given otherwise. Cost: one small collective."""
    told = exchange(given, state, function)
    for name in given:
        rule = f"{function}: {name} must be the same on every rank"
        check_alike([repr(each[name]) for each in told], rule, error=ArgumentError)
