"""The backward of a loss that is a sum and a count, or several terms of such."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_fn.base.buffers import spare_buffers
from accel_fn.base.rng import restored_random
from accel_fn.base.state import DistState
from accel_fn.base.weights import Weight
from accel_fn.step.global_mean import GlobalMean
from accel_fn.step.loss_module import Metrics, Outcome
from accel_fn.step.loss_terms import COUNTED, counted_in
from accel_fn.step.plan import Plan

if TYPE_CHECKING:
    from accel_fn.step.loop import Strategy


class CountedLoss:
    """Seeds of the backwards of one step.

    The gradient of one sum may wait for its count as an open factor, up to the end of the step. Several
    sums have several factors, and in float16 a sum may overflow: these need their counts before the first
    backward. They are added up over the ranks after the first forward, for which the other micro-batches
    run once more without gradients.
    """

    def __init__(
        self,
        strategy: Strategy,
        plan: Plan,
        state: DistState,
        mean: GlobalMean,
        every: Sequence[tuple[Any, Weight]],
    ) -> None:
        self._strategy, self._plan, self._state, self._mean = strategy, plan, state, mean
        self._every = every
        """Micro-batches and their weights."""
        self._is_first = True
        """Has no micro-batch of this step been run?"""
        self._seeds: Tensor | None = None
        """The factor of each sum, [terms], once counts are known."""

    def __call__(self, outcome: Outcome, weight: Weight) -> tuple[Tensor, Metrics, Tensor | None]:
        """The outcome of the next micro-batch, and the seed of its backward; None for that of a mean."""
        loss, metrics = outcome
        layout, pairs = self._strategy.layout, counted_in(metrics)
        if layout.counts is None and self._is_first:
            self._know(metrics, weight)
        if not layout.counts:
            return loss, metrics, None
        scaler, comes_first = self._state.scaler, self._strategy.counts_first
        first = len(layout.counts) > 1 or scaler is not None or comes_first
        if first and self._strategy.retries:
            # On all ranks: marked as wrong metrics are, since one that raised here would raise alone.
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
            # Other metrics than in the first batch are refused once losses are added up.
            return loss, metrics, torch.zeros_like(loss)
        seed = self._seeds if scaler is None else self._seeds * scaler.scale
        return loss, metrics, seed.reshape(loss.shape).to(loss.dtype)

    def _know(self, metrics: Metrics, weight: Weight) -> None:
        """In the first batch, let all ranks know whether the loss is sums and counts."""
        self._is_first = False
        layout, pairs = self._strategy.layout, counted_in(metrics)
        names = tuple([name.removeprefix(COUNTED) for name in pairs])
        found = names if weight and "" not in metrics else None
        if self._state.world_size > 1 and not self._strategy.retries:
            self._mean.total()
            self._mean.agree_on_counts(found)
        else:
            layout.counts = found
            self._mean.is_open = (
                self._strategy.retries
            )  # also on a rank without rows, which knows nothing
        if layout.counts is None:  # nothing is known yet, and so nothing is counted
            layout.counts = names or None

    def _others(self) -> list[Mapping[str, Any]]:
        """Sums and counts of the other micro-batches; buffers and generators are put back."""
        rest = self._every[1:]
        if not rest:
            return []
        with (
            torch.no_grad(),
            restored_random(self._state.device),
            spare_buffers(self._plan.model),
        ):
            outputs = [
                self._strategy.outputs(self._plan, self._state, part, weight)
                for part, weight in rest
            ]
        return [
            counted_in(metrics) if weight else {}
            for (_, weight), (_, metrics) in zip(rest, outputs, strict=True)
        ]
