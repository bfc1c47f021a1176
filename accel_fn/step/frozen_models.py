"""The frozen models of a plan: how a loss gets them, what is refused, and where they begin."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from accel_fn.base.state import DistState
from accel_fn.comm import primitives
from accel_fn.comm.dtensor import is_sharded, local
from accel_fn.errors import ArgumentTypeError, PlanError, message
from accel_fn.step.plan import Plan

_NAME = "frozen"
"""The name of the parameter by which a loss gets the models."""


def takes_frozen(fn: Callable[..., Any]) -> bool:
    """Has a function a parameter named `frozen`, which it can be given by name?"""
    called = fn.forward if isinstance(fn, nn.Module) else fn
    try:
        found = inspect.signature(called).parameters.get(_NAME)
    except (TypeError, ValueError):  # a builtin may have no signature
        return False
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)


def given_frozen(fn: Callable[..., Any], frozen: Mapping[str, nn.Module]) -> Callable[..., Any]:
    """The function with the frozen models of a plan, if it takes them; else itself."""
    return partial(fn, **{_NAME: frozen}) if frozen and takes_frozen(fn) else fn


def tensors_of_frozen(plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers of the frozen models, as NAME.KEY."""
    for name, model in plan.frozen.items():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            yield f"{name}.{key}", tensor


def check_frozen(state: DistState, plan: Plan) -> None:
    """Refuse frozen models without values, with parameters of the model, or on another device."""
    trained = {_memory_of(each) for each in plan.model.parameters()} - {None}
    for name, tensor in tensors_of_frozen(plan):
        if tensor.is_meta:
            raise PlanError(
                f"build: frozen models must have values, got {name} on the meta device; fill it by "
                "load_model(folder, model)"
            )
        if _memory_of(tensor) in trained:
            raise PlanError(
                f"build: frozen models must share no parameter with the model, got {name}, which would "
                "be in evaluation mode and not be trained; give a copy, as by copy.deepcopy, or reach it "
                "by the model"
            )
    tensors = [each for _, each in tensors_of_frozen(plan)]
    is_left_there = tensors and not plan.place_frozen and all(each.is_cpu for each in tensors)
    if state.device.type != "cpu" and is_left_there:
        raise PlanError(
            f"build: frozen models must be on {state.device}, the device of the state, got all of "
            "their tensors on the CPU; add place()"
        )


def freeze_models(state: DistState, plan: Plan) -> None:
    """Place the frozen models, and keep them from being trained. This may fail on one rank alone."""
    for model in plan.frozen.values():
        for place in plan.place_frozen:
            if place(state, model) is not model:
                rule = "return the model that it was given, changed in place"
                raise ArgumentTypeError(message("build", "place_frozen", rule, "another"))
        model.eval().requires_grad_(False)


def share_frozen(state: DistState, plan: Plan) -> None:
    """Give the frozen models of every rank the values of rank 0, as the model gets them."""
    if state.world_size > 1:
        for _, tensor in tensors_of_frozen(plan):
            if not is_sharded(tensor):
                primitives.broadcast(tensor.detach(), state, 0, "build")


def _memory_of(tensor: Tensor) -> tuple[object, int] | None:
    """The memory of a tensor; None without any."""
    try:
        held = local(tensor)
        address = held.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # other layouts and subclasses may have none
        return None
    return (held.device, address) if address else None
