"""What the micro-batches of all ranks come to: their total weight, their mean loss, and a word beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from accel_fn.base.state import DistState
from accel_fn.comm import primitives
from accel_fn.errors import BatchError, StateError


class Tally(Protocol):
    """Kept over the micro-batches of one global batch, by every rank."""

    stop: bool
    """Once closed: has any rank asked for an end of the run?"""

    def share(self, weight: float) -> float:
        """What the backward of a micro-batch of this weight starts from."""

    def add(self, loss: Tensor, weight: float, *, last: bool) -> None:
        """Count a micro-batch, after its forward and before its backward."""

    def loads(self) -> Sequence[Tensor]:
        """The gradients of what the module gives beside the loss, once the micro-batch is counted."""

    def close(self) -> tuple[Tensor, float, float]:
        """After the last: mean loss and weight of the global batch, and what gradients lack as a factor."""


class SummedTally:
    """By two small collectives: the weight before the first backward, the loss beside the last.

    A micro-batch's share is w * world_size / w_total, so that an average over
    the ranks is the mean over the global batch. One rank's failure to count
    its batch travels as not-a-number, and is raised on all.
    """

    def __init__(
        self,
        state: DistState,
        weights: Sequence[float],
        failure: Exception | None,
        *,
        stop: bool = False,
    ) -> None:
        weight = float("nan") if failure else float(sum(weights))
        self._state = state
        self._failure = failure
        self._mean = torch.zeros((), device=state.device)
        self._works = list[primitives.Pending | primitives.PendingTotal]()
        self._known: float | None = None
        self.stop = stop
        if state.world_size == 1:
            self._known = checked_total(weight, failure)
        else:  # integers are exact up to 2**53
            self._totals = torch.tensor([weight, float(stop)], dtype=torch.float64)
            self._works.append(self._sum(self._totals))

    def _sum(self, tensor: Tensor) -> primitives.Pending | primitives.PendingTotal:
        return primitives.start_total(tensor, self._state, "step")

    def total(self) -> float:
        """The weight of the global batch; waits for it."""
        if self._known is None:
            for work in self._works:
                work.wait()
            total, stops = self._totals.tolist()
            self._known, self.stop = checked_total(total, self._failure), stops > 0
        return self._known

    def share(self, weight: float) -> float:
        total = self.total()
        return weight * self._state.world_size / total if total else 0.0

    def add(self, loss: Tensor, weight: float, *, last: bool) -> None:
        total = self.total()
        if weight:
            self._mean.add_(loss, alpha=weight / total)
        if last and self._state.world_size > 1:
            self._works = [self._sum(self._mean)]

    def loads(self) -> Sequence[Tensor]:
        return ()

    def close(self) -> tuple[Tensor, float, float]:
        total = self.total()
        for work in self._works:
            work.wait()
        return self._mean, total, 1.0


class OwnTally(SummedTally):
    """By the same sums, of ranks that keep their gradients: a share is of this rank's items alone.

    Nothing is awaited before the last backward is under way.
    """

    def __init__(
        self,
        state: DistState,
        weights: Sequence[float],
        failure: Exception | None,
        *,
        stop: bool,
    ) -> None:
        if state.scaler is not None:
            raise StateError(
                "step: state must carry no loss scale under local_sgd, got one; keep a state of its own "
                "for the step that scales"
            )
        super().__init__(state, weights, failure, stop=stop)
        self.own = sum(weights)

    def share(self, weight: float) -> float:
        return weight / self.own if weight else 0.0

    def add(self, loss: Tensor, weight: float, *, last: bool) -> None:
        if weight:
            self._mean.add_(loss, alpha=weight)
        if last:
            self._works.append(self._sum(self._mean))

    def close(self) -> tuple[Tensor, float, float]:
        total = self.total()
        return self._mean / total if total else self._mean, total, 1.0


def checked_total(total: float, failure: Exception | None) -> float:
    """A total as an int where it is one; raises where any rank's part of it could not be counted."""
    if failure is not None:
        raise failure
    if total != total:
        raise BatchError(
            "step: batch must be countable on every rank; another rank's error says why"
        )
    return int(total) if total.is_integer() else total


def mean_loss(
    state: DistState, tally: Tally, losses: Sequence[Tensor], weights: Sequence[float]
) -> Tensor:
    """The mean over all ranks of losses that are there already, none on a rank without items."""
    if not losses:
        losses, weights = (torch.zeros((), device=state.device),), (0,)
    for index, (loss, weight) in enumerate(zip(losses, weights, strict=True), start=1):
        tally.add(loss, weight, last=index == len(losses))
    return tally.close()[0]
