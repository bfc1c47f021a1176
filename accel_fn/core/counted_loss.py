"""Backward seeds for losses that return `(sum, count)`; reasons why a plan refuses such a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accel_fn.core.batch import count_samples
from accel_fn.core.loss import COUNTED, Metrics, Outcome, counted_in
from accel_fn.core.mean import GlobalMean
from accel_fn.core.plan import Plan
from accel_fn.core.restored import restored_random, spare_buffers
from accel_fn.core.state import DistState
from accel_fn.core.weights import Weight


class CountedLoss:
    """Computes the seed of each backward for a loss that returns `(sum, count)`.

    With one sum, the backward computes the gradient of the sum. At the end of the step, the factor
    of `Grads` divides this gradient by the count. With several sums, or in float16, where a sum may
    overflow, the counts must be known before the first backward. So, after the first forward, this
    class runs the other micro-batches once without gradients, and adds up the counts over the
    ranks.
    """

    def __init__(
        self,
        plan: Plan,
        state: DistState,
        mean: GlobalMean,
        every: Sequence[tuple[Any, Weight]],
        outputs: Callable[[Any, Weight], Outcome],
        *,
        retries: bool,
        counts_first: bool,
    ) -> None:
        self._plan, self._state, self._mean, self._layout = plan, state, mean, mean.layout
        self._every = every
        """The micro-batches of this rank and their weights."""
        self._outputs = outputs
        """A function that maps a micro-batch and its weight to the loss and metrics."""
        self._retries = retries
        self._counts_first = counts_first or state.scaler is not None
        self._is_first = True
        """Whether the next micro-batch is the first one of the step."""
        self._seeds: Tensor | None = None
        """The factor of each sum, [terms], once the counts are known."""

    def __call__(self, outcome: Outcome, weight: Weight) -> tuple[Tensor, Metrics, Tensor | None]:
        """Return loss, metrics and backward seed; the seed is None if the loss is a mean."""
        loss, metrics = outcome
        layout, pairs = self._layout, counted_in(metrics)
        if layout.counts is None and self._is_first:
            self._know(metrics, weight)
        if not layout.counts:
            return loss, metrics, None
        first = self._counts_first or len(layout.counts) > 1
        if first and self._retries:
            # Mark the loss as invalid, in the same way as an invalid metric: `Layout.settle` then
            # raises on all ranks. If this rank raised here, the other ranks would wait for it.
            rule = (
                'return means, by weight_fn, where accumulate("auto") may compute several terms, or '
                "gradients in float16, again, got (sum, count); give accumulate a number"
            )
            return loss, {**pairs, "": rule}, torch.zeros_like(loss)
        is_alone = self._state.world_size == 1 and len(self._every) == 1
        self._mean.is_open = not (first or is_alone)
        if self._mean.is_open:
            return loss, metrics, torch.ones_like(loss) if weight else torch.zeros_like(loss)
        if self._seeds is None:
            self._seeds = self._mean.seed_by_counts([pairs if weight else {}, *self._others()])
        if not weight or not pairs:
            # A micro-batch of weight 0 contributes no gradient. A loss without pairs has changed
            # its form since the first batch: the comparison of metrics after the loop finds this
            # error, and raises on all ranks.
            return loss, metrics, torch.zeros_like(loss)
        scaler = self._state.scaler
        seed = self._seeds if scaler is None else self._seeds * scaler.scale
        return loss, metrics, seed.reshape(loss.shape).to(loss.dtype)

    def _know(self, metrics: Metrics, weight: Weight) -> None:
        """Find out in the first batch if the loss is `(sum, count)`; without retries, ranks agree on it."""
        self._is_first = False
        layout, pairs = self._layout, counted_in(metrics)
        names = tuple([name.removeprefix(COUNTED) for name in pairs])
        found = names if weight and "" not in metrics else None
        if self._state.world_size > 1 and not self._retries:
            self._mean.total()
            self._mean.agree_on_counts(found)
        else:
            layout.counts = found
            # With retries, the ranks do not agree here, and a rank without rows cannot see what the
            # loss returns. Set `is_open` on that rank too, so that all ranks scale their gradients
            # in the same way.
            self._mean.is_open = self._retries
        # If no rank has items in its first micro-batch, use the names that this micro-batch, of
        # weight 0, has returned.
        if layout.counts is None:
            layout.counts = names or None

    def _others(self) -> list[Mapping[str, Any]]:
        """Compute sums and counts of the later micro-batches, then restore buffers and generators."""
        rest = self._every[1:]
        if not rest:
            return []
        with (
            torch.no_grad(),
            restored_random(self._state.device),
            spare_buffers(self._plan.model),
        ):
            outputs = [self._outputs(part, weight) for part, weight in rest]
        return [
            counted_in(metrics) if weight else {}
            for (_, weight), (_, metrics) in zip(rest, outputs, strict=True)
        ]


def counts_refused(state: DistState, plan: Plan) -> str:
    """Return the reason why this plan refuses a `(sum, count)` loss; "" if it accepts one."""
    what = "return the mean over the items that weight_fn counts, got (sum, count)"
    if plan.weight_fn is not count_samples:
        return f"{what} beside a weight_fn; leave weight_fn out"
    if plan.reduction == "sum":
        return f'{what} beside reduction="sum"; leave reduction out'
    if plan.having("local_gradients") and state.world_size > 1:
        return f"{what} under local_sgd, which averages ranks by their items; use wrap_ddp"
    if plan.compile_step:
        return f'{what} under compiled(scope="step"); use scope="loss"'
    return ""
