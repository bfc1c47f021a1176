"""Numbers that travel to all ranks in the bucket of the gradients, so that they cost nothing of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_fn._errors import ElsewhereError
from accel_fn._forward import Own, bare
from accel_fn._state import DistState
from accel_fn._tally import checked_total

_DIGIT = 4096.0
_CALLS = 8  # small, so that rounding in a sum over many ranks leaves whole numbers
_NUMBERS = 7


class Carrier(Own):
    """A module that maps a batch to its loss, with a few numbers as one parameter more.

    DDP averages the gradient of every parameter. That of `numbers` is what a
    backward is given for it, so its average arrives with the gradients.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        dtypes = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
        # Of the gradients' dtype where it is wide enough, since DDP has a bucket for each.
        dtype = torch.float64 if dtypes == {torch.float64} else torch.float32
        self.numbers = nn.Parameter(torch.zeros(_NUMBERS, dtype=dtype))
        self.unit = 1.0
        """About the weight of one rank, a power of two: multiplying by it rounds nothing."""
        self.calls = 0
        """How many global batches were begun, also those that failed here."""

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss of the module, and the numbers: a backward starts from both."""
        return bare(self.module)(batch), self.numbers.view(-1)


def is_wide(module: nn.Module) -> bool:
    """Do its gradients hold a weight? Those in float16 end at 65504."""
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
    return torch.float16 not in dtypes


class CarriedTally:
    """By the gradients' own all-reduce: a micro-batch's share is its weight in units.

    The sum over the ranks is then the mean over the global batch but for a
    factor, which is known once the total weight has arrived beside it. The unit
    follows the total from batch to batch, so that the factor is near one, and
    exactly one where weights are powers of two. It moves no bit of any result.
    """

    def __init__(
        self,
        carrier: Carrier,
        state: DistState,
        weights: Sequence[float],
        failure: Exception | None,
        *,
        stop: bool,
    ) -> None:
        self._carrier = carrier
        self._world_size = state.world_size
        self._weight = float("nan") if failure else sum(weights)
        self._failure = failure
        self._loss = 0.0
        self._load: Tensor | None = None
        self.stop = stop
        carrier.calls += 1

    def share(self, weight: float) -> float:
        return weight / self._carrier.unit

    def add(self, loss: Tensor, weight: float, *, last: bool) -> None:
        if weight:
            self._loss += loss.item() * self.share(weight)
        if last:
            call = float(self._carrier.calls % _CALLS)
            numbers = [self._loss, float(self.stop), call, call * call, *_digits(self._weight)]
            self._load = torch.tensor(numbers, dtype=self._carrier.numbers.dtype)

    def loads(self) -> Sequence[Tensor]:
        return (torch.zeros_like(self._carrier.numbers) if self._load is None else self._load,)

    def close(self) -> tuple[Tensor, float, float]:
        carrier = self._carrier
        arrived = carrier.numbers.grad
        assert arrived is not None
        loss, stops, call, square, *digits = arrived.tolist()
        self.stop = stops > 0
        self._check_call(call, square)
        total = checked_total(_number(digits, self._world_size), self._failure)
        if not total:
            return torch.zeros(()), total, 1.0
        factor = carrier.unit * self._world_size / total
        mean = torch.tensor(loss * factor)
        carrier.unit = math.ldexp(1.0, math.frexp(total / self._world_size)[1] - 1)
        return mean, total, factor

    def _check_call(self, mean: float, mean_square: float) -> None:
        """Refuse, on all ranks alike, a sum over different calls: numbers without variance are equal."""
        total, squares = (round(each * self._world_size) for each in (mean, mean_square))
        if total * total != squares * self._world_size:
            raise ElsewhereError(
                "step: every rank must be at the same call of it, got another rank at another one; where a "
                "step fails on one rank, end the run: the others are within that step"
            )


def _digits(weight: float) -> list[float]:
    """A weight as three numbers whose sums over the ranks float32 holds: two whole, one a fraction."""
    if weight != weight:
        return [weight] * 3
    high, low = divmod(weight, _DIGIT)
    return [high, float(math.floor(low)), low - math.floor(low)]


def _number(averages: list[float], world_size: int) -> float:
    """The sum of weights out of the averages of their digits: whole ones may have been rounded."""
    high, low, fraction = (average * world_size for average in averages)
    if high != high:
        return high
    return round(high) * _DIGIT + round(low) + fraction
