"""What must be equal on every rank, compared: the plan before the first step, its gradients in it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from accel_fn import _comm
from accel_fn._errors import ReplicaError
from accel_fn._grads import Grads
from accel_fn._plan import Plan, describe, slot_names
from accel_fn._shards import is_sharded
from accel_fn._state import DistState


def check_same_plan(state: DistState, plan: Plan) -> None:
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


def check_same_gradients(state: DistState, plan: Plan, grads: Grads) -> None:
    """Raise on every rank if what the optimizer is about to see differs between ranks.

    Cost: one read of the gradients, one small collective, one host synchronisation.
    """
    names = {id(p): name for name, p in plan.model.named_parameters()}
    prints = {"the factor": fingerprint(grads.factor)}
    for parameter, tensor in zip(plan.trained(), grads.tensors, strict=True):
        prints[names[id(parameter)]] = fingerprint(tensor)
    every = _comm.exchange(prints, state, "step")
    for rank, theirs in enumerate(every):
        for name, first in every[0].items():
            if theirs[name] != first:
                raise ReplicaError(
                    f"step: gradients must be equal on all ranks, {name} differs on rank {rank}; average "
                    "with reduce_mean what is computed by rank, and draw random numbers by state.step"
                )


def fingerprint(tensor: Tensor | None) -> int:
    """A sum over the bits of a tensor: equal tensors give equal sums. 0 for one in shards."""
    if tensor is None or is_sharded(tensor):
        return 0
    dense = tensor.coalesce().values() if tensor.is_sparse else tensor
    dense = torch.view_as_real(dense) if dense.is_complex() else dense
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dense.element_size()]
    return int(dense.contiguous().view(bits).sum(dtype=torch.int64))
