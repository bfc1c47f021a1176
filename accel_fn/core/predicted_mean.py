"""A global mean that predicts its weight, so that no backward waits for the sum of all ranks' weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel_fn.core.mean import NUM_FACTS, GlobalMean, Layout
from accel_fn.core.state import DistState
from accel_fn.core.weights import Weight


class PredictedMean(GlobalMean):
    """A global mean whose backwards start from the weight of the last batch.

    Most batches have the same weight. If a batch has another one, `correction` is the factor that
    makes the gradients those of its own mean, exact up to rounding. On the CPU, one message during
    the last backward carries weights, losses, metrics, failures and stops. On an accelerator, the
    host sends the weights when the step starts, and waits for them after it has launched the last
    backward.

    It predicts nothing in the first step, after a batch of weight 0, and in a forward without a
    backward. It predicts nothing either if terms, `(sum, count)` or a loss scale need the total
    first.
    """

    def __init__(
        self, state: DistState, weights: Sequence[Weight], *args: Any, layout: Layout, **facts: Any
    ) -> None:
        is_mean = not (layout.counts or layout.terms or layout.is_sum)
        is_step = not facts.get("is_forward") and state.scaler is None and not state.axes
        self._predicted = layout.last_total if layout.predicts and is_mean and is_step else ()
        # In the first step after a `load`, the ranks still have to agree on the metrics.
        is_known = layout.counts == () and layout.sizes is not None
        self._is_joined = bool(self._predicted) and is_known and state.device.type == "cpu"
        self._message: Sequence[float] = ()
        super().__init__(state, weights, *args, layout=layout, **facts)
        if self._predicted:
            self._divisor = self._predicted

    def _begin(self, message: Sequence[float]) -> None:
        if self._is_joined:
            self._message = message
        else:
            super()._begin(message)

    def total(self) -> Weight:
        """Wait for the weight of the global batch; before `send`, drop the prediction first."""
        if self._is_joined and not self._pending and self._total is None:
            self._predicted, self._is_joined, self._divisor = (), False, None
            super()._begin(self._message)
        return super().total()

    def send(self) -> None:
        """Start the sum over the ranks; on the CPU, it includes the weights."""
        if not self._is_joined:
            super().send()
            return
        self._settle_metrics()
        loss, wrong, *_ = self._sums.tolist()
        metrics = self._sums[1 + NUM_FACTS :].double()
        facts = torch.tensor([loss, wrong, *self._facts], dtype=torch.float64)
        self._totals = torch.cat([facts, metrics])
        self._weights = self._sum(self._totals, self._state, "losses")
        self._pending.append(self._weights)

    def _facts_of_ranks(self) -> np.ndarray[Any, Any]:
        every = super()._facts_of_ranks()
        return every[:, 2:5] if self._is_joined else every

    def close(self) -> tuple[Tensor, dict[str, Tensor], Weight]:
        """Wait for the sums; return means and weight of the global batch, and metrics."""
        if not self._predicted:
            return super().close()
        total = self.total()
        if self._is_joined:
            self._sums = self._totals.to(self._sums.dtype)
            self._mean = self._losses()
        if total and total != self._predicted and not self.layout.counts:
            self.correction = self._predicted[0] / total[0]
        loss, metrics, total = super().close()
        if self.correction != 1.0:
            loss = loss * self.correction
            sizes = self.layout.sizes or {}
            metrics = {n: v * self.correction if sizes[n] == 1 else v for n, v in metrics.items()}
        return loss, metrics, total
