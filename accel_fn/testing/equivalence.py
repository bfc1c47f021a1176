"""assert_equivalent: check that two plans train the same model, in worlds of any size."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from accel_fn.checkpoint.build import build
from accel_fn.core.dtensor import whole
from accel_fn.core.loss import given_frozen
from accel_fn.core.plan import Plan
from accel_fn.core.report import Report
from accel_fn.core.split_batch import take_part
from accel_fn.core.state import DistState
from accel_fn.errors import ArgumentError, ArgumentTypeError, NotEquivalentError, message
from accel_fn.testing.operations import Operation, first_difference, recorded
from accel_fn.testing.simulation import simulate

_REPORTED = 1e-6
"""Reports hold losses and norms in float32, so they are compared with this tolerance."""


@dataclass(frozen=True, slots=True)
class After:
    """One rank after a batch: parameters and buffers by name, the report, and recorded operations."""

    values: dict[str, Tensor]
    report: Report
    operations: list[Operation] = field(default_factory=list)


Trace = list[After]


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

    Each plan gets a copy of its model, optimizer and frozen models, leaves out `log_to` and
    `profile`, and trains on the given numbers of simulated ranks. Each rank takes its consecutive
    part of every batch, which is empty if there are fewer samples than ranks, and starts from
    different parameters, which `build` must replace by rank 0's. After every batch, parameters,
    buffers and reports are compared, on every rank: loss, weight, verdict, and the norm if both
    report it.

    Args:
        plan_a: one plan. Its `loss_fn` must use the model that is its argument.
        plan_b: the other plan; often the same with one more transform.
        batches: global batches, trees of tensors [num_samples, ...] on the CPU.
        world_sizes: numbers of ranks for `plan_a` and for `plan_b`; more than one needs `wrap_ddp`
            or `wrap_fsdp`.
        rtol: largest difference, relative to the values; for float64.
        atol: largest difference of values near 0.
        timeout_s: the time-out of collectives.

    Raises:
        AssertionError: names the first batch, rank and parameter that differ, and by how much,
            and, with equal world sizes, the first operation of torch whose output differs; or
            the first value that is not a number, with which nothing can be compared.
        ValueError: no batches, weights of zero, no parameter that moves or a loss that ignores
            the batch, with which every two plans would be equivalent; models with different
            parameters; an argument outside its range.
        Exception: an error of the training itself.

    Cost: trains twice, two batches more of each if they differ.

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
    for batch, after in enumerate(expected):
        for rank, trace in enumerate(traces):
            where = f"after batch {batch} on rank {rank}"
            try:
                _compare(after.values, trace[batch].values, where, rtol, atol)
                _compare_reports(after.report, trace[batch].report, where, rtol)
            except NotEquivalentError as error:
                if world_sizes[0] != world_sizes[1]:
                    raise
                both = [
                    train(plan, every[: batch + 1], world_size=world_sizes[0], records=True)
                    for plan in (plan_a, plan_b)
                ]
                a, b = [runs[rank][batch].operations for runs in both]
                raise NotEquivalentError(f"{error}{first_difference(a, b, rtol, atol)}") from None
    _check_that_it_trains(plan_a, every, expected)


def train(
    plan: Plan,
    batches: Sequence[Any],
    *,
    world_size: int,
    timeout_s: float = 30.0,
    records: bool = False,
) -> list[Trace]:
    """Train copies of a plan on simulated ranks; return one trace per rank.

    Ranks start from different parameters and buffers. With `records`, the operations of the last
    batch are recorded.
    """
    plans = [copied(plan) for _ in range(world_size)]
    for rank, each in enumerate(plans):
        for model in (each.model, *each.frozen.values()):
            _move(model, rank)

    def run(state: DistState) -> Trace:
        own = plans[state.rank]
        state, step = build(own, state)
        trace: Trace = []
        for number, batch in enumerate(batches, start=1):
            part = take_part(batch, state.rank, state.world_size)
            watched: AbstractContextManager[list[Operation]]
            watched = recorded() if records and number == len(batches) else nullcontext([])
            with watched as operations:
                state, report = step(state, part)
            values = {**dict(own.model.named_parameters()), **dict(own.model.named_buffers())}
            copies = {name: whole(value).clone() for name, value in values.items()}
            trace.append(After(copies, report, operations))
        return trace

    return simulate(run, world_size=world_size, timeout_s=timeout_s)


@torch.no_grad()
def _move(model: torch.nn.Module, rank: int) -> None:
    """Change parameters and buffers on all ranks except rank 0, whose values `build` must copy."""
    for value in [*model.parameters(), *model.buffers()] if rank else []:
        if value.is_floating_point() and value.itemsize > 1:
            value += rank


def copied(plan: Plan) -> Plan:
    """Copy a plan with its models and optimizers; keep the hooks of parameters, and leave out observers."""
    model, optimizer, frozen = copy.deepcopy((plan.model, plan.optimizer, plan.frozen))
    for old, new in zip(plan.model.parameters(), model.parameters(), strict=True):
        # A deep copy of a parameter does not copy its hooks.
        for hook in (old._backward_hooks or {}).values():
            new.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in (old._post_accumulate_grad_hooks or {}).values():
            new.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    # Leave out observers: logs and profiles are files of the user's run.
    return replace(plan, model=model, optimizer=optimizer, frozen=frozen, observers=())


def _check_that_it_trains(plan: Plan, batches: Sequence[Any], trace: Trace) -> None:
    """Refuse a training that could not show a difference between plans."""
    start, end = dict(plan.model.named_parameters()), trace[-1].values
    rule = ""
    if not any(weight for after in trace for weight in _weights(after.report).values()):
        rule = "batches must weigh something, got a weight of 0 for each"
    elif all(torch.equal(whole(value), end[name]) for name, value in start.items()):
        rule = (
            "plan_a must move a parameter, got the same parameters after "
            f"{len(batches)} batches; use a learning rate > 0 and updates that are applied"
        )
    elif _ignores_batch(plan, batches):
        rule = "plan_a's loss_fn must depend on the batch, got the same loss for every half of one"
    if rule:
        raise ArgumentError(f"assert_equivalent: {rule}: every two plans would be equivalent")


def _ignores_batch(plan: Plan, batches: Sequence[Any]) -> bool:
    """Return whether every loss stays the same if its batch is halved or gets other numbers."""
    for batch in batches:
        halves = [take_part(batch, rank, 2) for rank in range(2)]
        other = tree_map_only(Tensor, lambda v: v * 0.5 + 1 if v.is_floating_point() else v, batch)
        given = [_tensors(each) for each in (*halves, batch, other)]
        if torch.equal(given[0], given[1]) and torch.equal(given[2], given[3]):
            # Nothing to compare: the halves are equal, and the batch has no number to change.
            return False
        try:
            losses = [_loss(copied(plan), each) for each in (*halves, batch, other)]
        except Exception:
            # A loss that raises for a half depends on the batch.
            return False
        if not all(torch.equal(losses[0], each) for each in losses):
            return False
    return True


def _weights(report: Report) -> dict[str, float]:
    """Return the weight of the global batch, or of each term, by name."""
    weight = report.weight
    if isinstance(weight, Mapping):
        return {f"weight of {name}": each for name, each in weight.items()}
    return {"weight": weight}


def _loss(plan: Plan, batch: Any) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        found = given_frozen(plan.loss_fn, plan.frozen)(plan.model, batch)
    loss = found[0] if isinstance(found, tuple) else found
    terms = [loss] if isinstance(loss, Tensor) else [*loss.values()]
    return torch.stack(terms).detach()


def _tensors(batch: Any) -> Tensor:
    """Join all tensors of a batch to one tensor of float64."""
    tensors = [each.double().flatten() for each in tree_leaves(batch) if isinstance(each, Tensor)]
    return torch.cat(tensors)


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
            # Booleans cannot be subtracted, so convert them to numbers.
            differences = (found[name] * 1.0 - value * 1.0).abs()
            largest = float(differences.nan_to_num(nan=0.0, posinf=math.inf).max())
            raise NotEquivalentError(
                f"assert_equivalent: plans must train the same model, {name} differs by up to "
                f"{largest:.3g} {where} (rtol={rtol:g}, atol={atol:g})"
            )


def _compare_reports(expected: Report, found: Report, where: str, rtol: float) -> None:
    for name, a in _reported(expected).items():
        b = _reported(found).get(name)
        if a is None or b is None:
            continue
        # Both plans may have skipped a batch with a loss of nan.
        if math.isnan(float(a)) and math.isnan(float(b)):
            continue
        if not math.isclose(float(a), float(b), rel_tol=max(rtol, _REPORTED), abs_tol=_REPORTED):
            raise NotEquivalentError(
                f"assert_equivalent: plans must report the same, {name} is {float(a):.9g} with "
                f"plan_a and {float(b):.9g} with plan_b {where}"
            )


def _reported(report: Report) -> dict[str, Any]:
    """Return, by name, the numbers of a report that are compared."""
    terms = {f"term {name}": each for name, each in report.terms.items()}
    others = {"applied": report.applied, "grad_norm": report.grad_norm}
    return {"loss": report.loss, **terms, **_weights(report), **others}


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
