"""The loop of a step: forward and backward of every micro-batch, to the mean over the global batch."""

from __future__ import annotations

from functools import partial
from operator import call
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_fn.base.given_batches import PLACES, place_of
from accel_fn.base.state import DistState
from accel_fn.base.weights import Weight
from accel_fn.step.global_mean import GlobalMean, seed_of
from accel_fn.step.grads import Grads
from accel_fn.step.loss_module import Metrics, Outcome
from accel_fn.step.loss_terms import COUNTED, counted_in
from accel_fn.step.microbatches import Parts, Weights, microbatches_or_failure
from accel_fn.step.plan import Plan
from accel_fn.step.report import Report
from accel_fn.step.wide_sums import Backward, WideBackward

if TYPE_CHECKING:
    from accel_fn.step.strategy import Strategy


def gradients(
    strategy: Strategy, plan: Plan, state: DistState, batch: Any
) -> tuple[DistState, Grads, Report]:
    """The gradients of the global batch, and the report of its losses."""
    try:
        mean, parts, weights = begin(strategy, plan, state, batch)
        strategy.run(plan, state, mean, parts, weights)
        grads, report = finish(strategy, plan, state, mean)
    except BaseException as error:
        strategy.reset()
        strategy.parameters.explain(error)
        raise
    return state, grads, report


def begin(
    strategy: Strategy, plan: Plan, state: DistState, batch: Any
) -> tuple[GlobalMean, Parts, Weights]:
    """Split and weigh the batch, and start the sum of the weights over the ranks."""
    for parameter in strategy.reachable:
        parameter.grad = None
    stop = False
    failed: Exception | None = None
    try:
        stop = any(map(call, plan.should_stop))
    except Exception as error:
        failed = error  # raised once the other ranks know, as what fails with the batch
    parts, weights, failure = microbatches_or_failure(
        plan, batch, strategy.parameters.check, retries=strategy.retries
    )
    if strategy.check_parts is not None and failure is None:
        failure = strategy.check_parts(parts)
    place = place_of(batch) if PLACES.data else None  # of few batches, so most steps call nothing
    mean = strategy.global_mean(state, weights, failed or failure, stop, place)
    if strategy.check_parts is not None:
        mean.total()  # else a forward would run on the ranks without an error, and move statistics
    parts, weights = strategy.pad(state, mean, parts, weights)
    if not (any(weights) or (parts and strategy.pads)):
        # A rank without items still joins every collective, with one micro-batch of weight 0.
        parts, weights = (*parts, None), (*weights, 0)
    return mean, parts, weights


def run(
    strategy: Strategy,
    plan: Plan,
    state: DistState,
    mean: GlobalMean,
    parts: Parts,
    weights: Weights,
) -> None:
    """Run one micro-batch after the other; the backward of the last averages the gradients of all."""
    outputs = strategy.checks.watched(partial(strategy.outputs, plan, state))
    every = [*zip(parts, weights, strict=True)]
    # If a rank may run out of memory, gradients stay on the ranks until all have voted.
    num_local = len(every) if strategy.retries else len(every) - 1
    backward = _backward_of(strategy, len(every))

    counts = partial(_counted, strategy, state, mean)

    def run_one(part: Any, weight: Weight, *, sends: bool = False) -> None:
        outcome = outputs(part, weight)
        is_mean = strategy.layout.counts == ()
        loss, metrics, seed = (*outcome, None) if is_mean else counts(outcome, weight)
        mean.add(loss.detach(), metrics, weight)
        if sends:
            mean.send()
        backward(loss, seed_of(loss, mean.share(weight), state.scaler) if seed is None else seed)

    if num_local:
        # Micro-batches of weight 0 come first, so that whatever gradients they leave can be zeroed.
        num_weightless = [*map(bool, weights), True].index(True)
        with strategy.no_sync():
            for index, (part, weight) in enumerate(every[:num_local]):
                run_one(part, weight)
                if index < num_weightless:
                    strategy.zero_gradients()
    if strategy.retries:
        if parts[0] is not None:
            strategy.checks.check_reached()
        strategy.vote(state)
    for part, weight in every[num_local:]:
        run_one(part, weight, sends=not strategy.settles)  # losses travel beside the last backward
    if strategy.retries or strategy.settles:
        strategy.settle(state)
        mean.send()


def _backward_of(strategy: Strategy, num_microbatches: int) -> Backward:
    if strategy.halves and num_microbatches > 1:
        return WideBackward(strategy.backward, strategy.halves, num_microbatches)
    return strategy.backward


def _counted(
    strategy: Strategy, state: DistState, mean: GlobalMean, outcome: Outcome, weight: Weight
) -> tuple[Tensor, Metrics, Tensor | None]:
    """The outcome, and the seed of its backward where its terms are sums and counts.

    The gradient of one sum may wait for its count as an open factor, up to the end of the step. Several
    sums have several factors, and in float16 a sum may overflow: these need their counts before.
    """
    loss, metrics = outcome
    layout, pairs = strategy.layout, counted_in(metrics)
    if layout.counts is None:
        names = tuple([name.removeprefix(COUNTED) for name in pairs])
        found = names if weight and "" not in metrics else None
        if state.world_size > 1 and not strategy.retries:
            mean.total()
            mean.agree_on_counts(found)
        else:
            layout.counts = found
        if layout.counts is None:  # nothing is known yet, and so nothing is counted
            layout.counts = names or None
    if not layout.counts:
        return loss, metrics, None
    first = len(layout.counts) > 1 or state.scaler is not None or strategy.counts_first
    is_single = mean.is_single()
    if first and (not is_single or strategy.retries):
        # On all ranks: marked as wrong metrics are, since one that raised here would raise alone.
        what = (
            "several terms"
            if len(layout.counts) > 1
            else "gradients in float16, or of wrap_deepspeed"
        )
        rule = (
            f"return means, by weight_fn, where {what} are computed in several micro-batches, whose counts "
            "are not known before the first backward, got (sum, count); use one micro-batch a rank, or "
            "Plan(..., weight_fn={name: ...}) and the mean of each term"
        )
        return loss, {**pairs, "": rule}, torch.zeros_like(loss)
    scale = None if state.scaler is None else state.scaler.scale
    mean.is_open = not (first or (is_single and state.world_size == 1))
    if mean.is_open:
        return loss, metrics, torch.ones_like(loss) if weight else torch.zeros_like(loss)
    seed = mean.seed_by_counts(pairs if weight else {})
    seed = seed if scale is None else seed * scale
    if (
        not weight or not pairs
    ):  # other metrics than in the first batch are refused once losses are added up
        return loss, metrics, torch.zeros_like(loss)
    return loss, metrics, seed.reshape(loss.shape).to(loss.dtype)


def finish(
    strategy: Strategy, plan: Plan, state: DistState, mean: GlobalMean
) -> tuple[Grads, Report]:
    """Average what is not averaged yet; take the gradients off the parameters, and the mean loss."""
    strategy.average(state)
    loss, metrics, total = mean.close()
    grads = strategy.take(state, total)
    if strategy.layout.counts and mean.is_open:
        grads = grads.scaled(mean.open_factor(metrics))
    extras = mean.extras(plan)
    return grads, strategy.layout.report(loss, total, metrics=metrics, extras=extras)


def take_gradients(strategy: Strategy, state: DistState, weight: Weight) -> Grads:
    """The gradients, off the parameters, with the factor that undoes the loss scale."""
    tensors = tuple([parameter.grad for parameter in strategy.trained])
    strategy.checks.check_gradients(tensors, bool(weight))
    for parameter in strategy.reachable:
        parameter.grad = None
    if state.scaler is None:
        return Grads(tensors, norm_fn=strategy.norm, owners=strategy.owners)
    is_double = any(each is not None and each.dtype == torch.float64 for each in tensors)
    dtype = torch.float64 if is_double else torch.float32
    factor = state.scaler.scale.to(dtype).reciprocal()
    return Grads(tensors, factor, norm_fn=strategy.norm, owners=strategy.owners)
