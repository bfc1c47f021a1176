"""assert_equivalent: check that two plans train the same model, in worlds of any size."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accel_fn.base.split_batch import take_part
from accel_fn.base.state import DistState
from accel_fn.comm.dtensor import whole
from accel_fn.errors import ArgumentError, ArgumentTypeError, NotEquivalentError, message
from accel_fn.step.build import build
from accel_fn.step.plan import Plan
from accel_fn.testing.simulation import simulate

Trace = list[dict[str, Tensor]]  # parameters and buffers by name, after every batch


def assert_equivalent(
    plan_a: Plan,
    plan_b: Plan,
    batches: Iterable[Any],
    *,
    world_sizes: tuple[int, int] = (1, 1),
    rtol: float = 1e-9,
    atol: float = 1e-12,
    timeout_s: float = 30.0,
) -> None:
    """Train both plans on the same global batches, and raise unless they stay equal.

    Each plan gets a copy of its model and optimizer, and trains on as many
    simulated ranks as given: each rank takes its consecutive part of every
    batch, empty where there are fewer samples than ranks. After every batch,
    parameters and buffers are compared, on every rank.

    Args:
        plan_a: one plan. Its `loss_fn` must use the model that it is given.
        plan_b: the other; often the same plan with one more transform.
        batches: global batches, trees of tensors [num_samples, ...] on the CPU.
        world_sizes: ranks for `plan_a` and for `plan_b`; more than one needs `wrap_ddp` or
            `wrap_fsdp`.
        rtol: largest difference, relative to the values; for float64.
        atol: largest difference where values are near 0.
        timeout_s: of collectives.

    Raises:
        AssertionError: names the first batch, rank and parameter that differ, and by how much;
            or the first that is not a number, with which nothing can be compared.
        ValueError: no batches, with which every two plans would be equivalent; models of other
            parameters; an argument outside its range.
        Exception: an error of the training itself.

    Cost: trains twice.

    >>> import accel_fn as af
    >>> from accel_fn.testing import assert_equivalent
    >>> plan = af.Plan(loss_fn, model, optimizer)
    >>> assert_equivalent(plan, af.accumulate(3)(plan), batches=[batch], rtol=1e-5, atol=1e-6)
    """
    every = list(batches)
    if not every:
        raise ArgumentError(message("assert_equivalent", "batches", "hold a batch", every))
    _check_tolerance("rtol", rtol)
    _check_tolerance("atol", atol)
    expected = train(plan_a, every, world_size=world_sizes[0], timeout_s=timeout_s)[0]
    traces = train(plan_b, every, world_size=world_sizes[1], timeout_s=timeout_s)
    for batch in range(len(every)):
        for rank, trace in enumerate(traces):
            where = f"after batch {batch} on rank {rank}"
            _compare(expected[batch], trace[batch], where, rtol, atol)


def train(
    plan: Plan, batches: Sequence[Any], *, world_size: int, timeout_s: float = 30.0
) -> list[Trace]:
    """Train copies of a plan on simulated ranks; return one trace a rank."""
    plans = [copied(plan) for _ in range(world_size)]

    def run(state: DistState) -> Trace:
        own = plans[state.rank]
        state, step = build(state, own)
        trace: Trace = []
        for batch in batches:
            part = take_part(batch, state.rank, state.world_size)
            state, _ = step(state, part)
            values = {**dict(own.model.named_parameters()), **dict(own.model.named_buffers())}
            trace.append({name: whole(value).clone() for name, value in values.items()})
        return trace

    return simulate(run, world_size=world_size, timeout_s=timeout_s)


def copied(plan: Plan) -> Plan:
    """Copy model and optimizer of a plan together."""
    model, optimizer = copy.deepcopy((plan.model, plan.optimizer))
    return replace(plan, model=model, optimizer=optimizer)


def _check_tolerance(name: str, value: float) -> None:
    rule = "be a finite number >= 0"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(message("assert_equivalent", name, rule, value))
    if not 0 <= value < math.inf:
        raise ArgumentError(message("assert_equivalent", name, rule, value))


def _compare(
    expected: dict[str, Tensor], found: dict[str, Tensor], where: str, rtol: float, atol: float
) -> None:
    odd = sorted(_kinds(expected) ^ _kinds(found))
    if odd:
        rule = "hold models of the same parameters and buffers"
        raise ArgumentError(f"assert_equivalent: plans must {rule}, got {odd[0]} in one alone")
    for name, value in expected.items():
        _check_numbers(name, {"plan_a": value, "plan_b": found[name]}, where)
        if not torch.allclose(found[name], value, rtol=rtol, atol=atol):
            differences = (found[name] * 1.0 - value * 1.0).abs()  # also of booleans
            largest = float(differences.nan_to_num(nan=0.0, posinf=math.inf).max())
            raise NotEquivalentError(
                f"assert_equivalent: plans must train the same model, {name} differs by up to "
                f"{largest:.3g} {where} (rtol={rtol:g}, atol={atol:g})"
            )


def _kinds(tensors: dict[str, Tensor]) -> set[str]:
    return {f"{name} {list(value.shape)} {value.dtype}" for name, value in tensors.items()}


def _check_numbers(name: str, values: dict[str, Tensor], where: str) -> None:
    """Refuse nan, which cannot be compared."""
    whose = [plan for plan, value in values.items() if value.isnan().any()]
    if whose:
        raise NotEquivalentError(
            f"assert_equivalent: plans must train to numbers, {name} is nan with {' and '.join(whose)} "
            f"{where}; use batches, or a learning rate, with which both stay finite"
        )
