"""Numbers that travel to all ranks in the bucket of the gradients, so that they cost nothing of their own."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_fn.base.state import DistState
from accel_fn.errors import PeerError
from accel_fn.step.global_mean import checked_total
from accel_fn.step.loss_module import Own, bare

_DIGIT = 4096.0
_CALLS = 8  # small, so that rounding in a sum over many ranks leaves whole numbers
_NUMBERS = 7
_NOTHING = (0.0,) * _NUMBERS
_LINE = 64  # bytes


class Carrier(Own):
    """A module that maps a batch to its loss, with a few numbers as one parameter more.

    DDP averages the gradient of every parameter. That of `numbers` is what a
    backward is given for it, so its average arrives with the gradients.
    """

    def __init__(self, module: nn.Module, *, finds_unused: bool = False) -> None:
        super().__init__()
        self.module = module
        self._finds_unused = finds_unused
        trained = [each for each in module.parameters() if each.requires_grad]
        # Of the gradients' dtype where it is wide enough, since DDP has a bucket for each.
        double = {each.dtype for each in trained} == {torch.float64}
        dtype = torch.float64 if double else torch.float32
        self.cargo = Cargo(dtype, _room([each for each in trained if each.dtype == dtype]))
        self.numbers = self.cargo.numbers

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss of the module, and the numbers: a backward starts from both."""
        loss, numbers = bare(self.module)(batch), self.cargo.numbers
        # DDP finds what was used by the functions that gave it, and a parameter has none.
        return loss, numbers.clone() if self._finds_unused else numbers


class Cargo:
    """What a carrier takes along, and what it knows from batch to batch. Mutable; no module.

    The load is one tensor, written anew for each batch: a small step feels what it
    costs to make another, or to set an attribute of a module.
    """

    def __init__(self, dtype: torch.dtype, room: int) -> None:
        code = "d" if dtype == torch.float64 else "f"
        self._memory = array(code, bytes(room * dtype.itemsize))
        self._layout = struct.Struct(f"{_NUMBERS}{code}")
        self.numbers = nn.Parameter(torch.zeros(room, dtype=dtype))
        self.load = torch.frombuffer(self._memory, dtype=dtype)
        """What this rank's backward is given for them: autograd copies it."""
        self.unit = 1.0
        """About the weight of one rank, a power of two: multiplying by it rounds nothing."""
        self.calls = 0
        """How many global batches were begun, also those that failed here."""

    def write(self, *numbers: float) -> None:
        """Make these the load."""
        self._layout.pack_into(self._memory, 0, *numbers)

    def arrived(self) -> list[float]:
        """The averages over the ranks, after a backward."""
        average = self.numbers.grad
        assert average is not None
        return average.tolist()[:_NUMBERS]


def _room(parameters: Sequence[Tensor]) -> int:
    """How many numbers to send, so that the largest gradient begins at a cache line of DDP's bucket.

    That has the numbers first, then the gradients from the last one on. Those that lie across
    lines take longer to copy and to average.
    """
    sizes = [each.numel() for each in reversed(parameters)]
    before = sum(sizes[: sizes.index(max(sizes))]) if sizes else 0
    line = _LINE // parameters[0].dtype.itemsize if sizes else 1
    return _NUMBERS + -(_NUMBERS + before) % line


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
        self._cargo = cargo = carrier.cargo
        self._world_size = state.world_size
        self._weight = float("nan") if failure else sum(weights)
        self._failure = failure
        self._loss = 0.0
        self.stop = stop
        cargo.calls += 1
        cargo.write(*_NOTHING)

    def share(self, weight: float) -> float:
        return weight / self._cargo.unit

    def add(self, loss: Tensor, weight: float, *, last: bool) -> None:
        if weight:
            self._loss += loss.item() * self.share(weight)
        if last:
            call = self._cargo.calls % _CALLS
            self._cargo.write(self._loss, self.stop, call, call * call, *_digits(self._weight))

    def loads(self) -> Sequence[Tensor]:
        return (self._cargo.load,)

    def close(self) -> tuple[Tensor, float, float]:
        cargo, world_size = self._cargo, self._world_size
        loss, stops, call, square, *digits = cargo.arrived()
        self.stop = stops > 0
        self._check_call(call, square)
        total = checked_total(_number(*digits, world_size=world_size), self._failure)
        if not total:
            return torch.zeros(()), total, 1.0
        factor = cargo.unit * world_size / total
        cargo.unit = math.ldexp(1.0, math.frexp(total / world_size)[1] - 1)
        return torch.full((), loss * factor), total, factor

    def _check_call(self, mean: float, mean_square: float) -> None:
        """Refuse, on all ranks alike, a sum over different calls: numbers without variance are equal."""
        world_size = self._world_size
        if round(mean * world_size) ** 2 != round(mean_square * world_size) * world_size:
            raise PeerError(
                "step: every rank must be at the same call of it, got another rank at another one; where a "
                "step fails on one rank, end the run: the others are within that step"
            )


def _digits(weight: float) -> tuple[float, float, float]:
    """A weight as three numbers whose sums over the ranks float32 holds: two whole, one a fraction."""
    if weight != weight:
        return weight, weight, weight
    high, low = divmod(weight, _DIGIT)
    whole = math.floor(low)
    return high, whole, low - whole


def _number(high: float, low: float, fraction: float, *, world_size: int) -> float:
    """The sum of weights out of the averages of their digits: whole ones may have been rounded."""
    if high != high:
        return high
    return round(high * world_size) * _DIGIT + round(low * world_size) + fraction * world_size
