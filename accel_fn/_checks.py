"""What a plan must fulfil before anything is moved or wrapped."""

from __future__ import annotations

import inspect
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_fn import _comm
from accel_fn._errors import PlanError, ReplicaError
from accel_fn._plan import Plan, describe, slot_names
from accel_fn._state import DistState

_SINGLE = ("move_model", "compile_loss", "own_parameters", "split")


def check_plan(state: DistState, plan: Plan) -> None:
    """Refuse a plan that cannot make a step, for a reason that needs no other rank."""
    _check_slots(plan)
    _check_parameters(plan)
    _check_optimizer(plan)
    _check_world(state, plan)


def _check_slots(plan: Plan) -> None:
    for slot in _SINGLE:
        entries = getattr(plan, slot)
        if len(entries) > 1:
            names = " and ".join(map(describe, entries))
            raise PlanError(
                f"build: plan must have at most one function in {slot}, got {names}; leave out one"
            )
    functions = [each.func if isinstance(each, partial) else each for each in plan.contexts]
    twice = [fn for fn, count in Counter(functions).items() if count > 1]
    if twice:
        names = " and ".join(describe(each) for each in plan.contexts)
        raise PlanError(f"build: plan must enter each context once, got {names}; leave out one")


def _check_parameters(plan: Plan) -> None:
    if not any(p.requires_grad for p in plan.model.parameters()):
        raise PlanError(
            f"build: model must have parameters that require a gradient, "
            f"got a {type(plan.model).__name__} with none"
        )
    known = {id(p) for p in plan.model.parameters()}
    given = [p for group in plan.optimizer.param_groups for p in group["params"]]
    foreign = [list(p.shape) for p in given if id(p) not in known]
    if foreign:
        raise PlanError(
            f"build: optimizer must hold parameters of the model alone, got {len(foreign)} others, of "
            f"shapes {foreign[:3]}; join the modules in one nn.ModuleDict, or make the optimizer "
            "after what replaces parameters"
        )
    if not any(p.requires_grad for p in given):
        raise PlanError(
            "build: optimizer must hold a parameter that requires a gradient, got none; unfreeze one"
        )


def _check_optimizer(plan: Plan) -> None:
    closure = inspect.signature(type(plan.optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"build: optimizer must update from gradients alone, got {type(plan.optimizer).__name__}, "
            "whose step evaluates the loss again; use another, or step.grads in a loop of your own"
        )


def _check_world(state: DistState, plan: Plan) -> None:
    if state.world_size > 1 and not plan.own_parameters:
        raise PlanError(
            f"build: plan must average gradients over the {state.world_size} ranks, got nothing that "
            "does; add wrap_ddp()"
        )
    options: dict[str, Any] = (
        getattr(plan.own_parameters[0], "keywords", {}) if plan.own_parameters else {}
    )
    if options.get("static_graph") and plan.split:
        raise PlanError(
            "build: wrap_ddp(static_graph=True) must not be combined with accumulate, whose first "
            "micro-batches DDP does not see; leave out one"
        )


def check_precision(state: DistState, model: nn.Module) -> None:
    """Refuse to scale the loss of parameters that are float16 themselves."""
    halves = [
        name for name, p in model.named_parameters() if p.dtype == torch.float16 and p.requires_grad
    ]
    if state.scaler is not None and halves:
        raise PlanError(
            f'build: with_amp("fp16") must have float32 parameters to update, got float16 {halves[0]}; '
            "use model.float(), autocast makes the float16 copies"
        )


def check_agreement(state: DistState, plan: Plan) -> None:
    """Raise on every rank if ranks build different steps: they would drift apart."""
    every = _comm.exchange(_summary(plan), state, "build")
    for rank, theirs in enumerate(every):
        for mine, other in zip(every[0], theirs, strict=False):
            if mine != other:
                raise ReplicaError(
                    f"build: plan must be the same on every rank, got {other} on rank {rank} and "
                    f"{mine} on rank 0"
                )
        if len(theirs) != len(every[0]):
            raise ReplicaError(
                f"build: model must be the same on every rank, got {len(theirs)} entries on rank {rank} "
                f"and {len(every[0])} on rank 0"
            )


def _summary(plan: Plan) -> list[str]:
    """What must agree: slots, hyperparameters, parameters. How a rank splits its part is its own affair."""
    slots = [
        f"{name}={list(map(_identity, getattr(plan, name)))}"
        for name in slot_names()
        if name != "split"
    ]
    groups = [
        {
            name: value
            for name, value in group.items()
            if isinstance(value, int | float | str | tuple)
        }
        for group in plan.optimizer.param_groups
    ]
    parameters = [
        f"{name} {list(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
        for name, p in plan.model.named_parameters()
    ]
    return [*slots, f"{type(plan.optimizer).__name__} {groups}", *parameters]


def _identity(fn: Any) -> str:
    """A function's name; with its arguments where it is ours, as a user's may differ by rank."""
    ours = fn.func if isinstance(fn, partial) else fn
    ours_too = str(getattr(ours, "__module__", "")).startswith("accel_fn.")
    return describe(fn) if ours_too else describe(ours)
