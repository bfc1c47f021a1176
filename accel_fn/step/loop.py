"""The loop of a step: forward and backward of every micro-batch, to the mean over the global batch."""

from __future__ import annotations

from functools import partial
from operator import call
from typing import TYPE_CHECKING, Any

import torch

from accel_fn.base.given_batches import PLACES, place_of
from accel_fn.base.state import DistState
from accel_fn.base.weights import Weight
from accel_fn.step.counted_loss import CountedLoss
from accel_fn.step.global_mean import GlobalMean, seed_of
from accel_fn.step.grads import Grads
from accel_fn.step.loss_terms import counted_in
from accel_fn.step.microbatches import Parts, Weights, microbatches_or_failure
from accel_fn.step.plan import Plan
from accel_fn.step.report import Report
from accel_fn.step.wide_sums import wide_backward

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
    parts, weights, rows, failure = microbatches_or_failure(
        plan, batch, strategy.parameters.check, retries=strategy.retries
    )
    if strategy.check_parts is not None and failure is None:
        failure = strategy.check_parts(parts)
    place = place_of(batch) if PLACES.data else None  # of few batches, so most steps call nothing
    mean = strategy.global_mean(state, weights, failed or failure, stop, place, rows)
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
    halves, plain = strategy.halves, strategy.backward
    backward = wide_backward(plain, halves, len(every)) if halves else plain
    is_mean = strategy.layout.counts == ()
    counts = None if is_mean else CountedLoss(strategy, plan, state, mean, every)

    def run_one(part: Any, weight: Weight, *, sends: bool = False) -> None:
        outcome = outputs(part, weight)
        loss, metrics, seed = (*outcome, None) if counts is None else counts(outcome, weight)
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


def finish(
    strategy: Strategy, plan: Plan, state: DistState, mean: GlobalMean
) -> tuple[Grads, Report]:
    """Average what is not averaged yet; take the gradients off the parameters, and the mean loss."""
    strategy.average(state)
    loss, metrics, total = mean.close()
    grads = strategy.take(state, total)
    if mean.is_open and counted_in(metrics):
        grads = grads.scaled(mean.open_factor(metrics))
    extras, samples = mean.extras(plan), mean.samples
    report = strategy.layout.report(loss, total, samples=samples, metrics=metrics, extras=extras)
    return grads, report


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
