"""A batch as weighed micro-batches, and what their weights and losses come to over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from accel_fn import _comm
from accel_fn._errors import BatchError
from accel_fn._plan import Plan
from accel_fn._state import DistState
from accel_fn._weights import weigh

Parts = Sequence[Any]
Weights = Sequence[float]


def cut(plan: Plan, batch: Any) -> tuple[Parts, Weights]:
    """The micro-batches that count for something, and their weights."""
    if not plan.split:
        weight = weigh(plan.weight_fn, batch)
        return ((batch,), (weight,)) if weight else ((), ())
    weighed = [(part, weigh(plan.weight_fn, part)) for part in plan.split[0](batch)]
    counted = [(part, weight) for part, weight in weighed if weight]
    return [part for part, _ in counted], [weight for _, weight in counted]


def cut_together(
    state: DistState, plan: Plan, batch: Any
) -> tuple[Parts, Weights, Callable[[], float]]:
    """`cut` on every rank, and a function that waits for the weight of the global batch.

    A batch that one rank cannot count is refused on all: not-a-number travels
    in place of its weight, and whoever waits for the sum raises.
    """
    if state.world_size == 1:
        parts, weights = cut(plan, batch)
        return parts, weights, lambda: sum(weights)
    failure = None
    parts, weights = (), ()
    try:
        parts, weights = cut(plan, batch)
    except Exception as error:
        failure = error
    mine = float("nan") if failure else float(sum(weights))
    total = torch.tensor(mine, dtype=torch.float64)  # integers are exact up to 2**53
    work = _comm.start_sum(total, state, "step")

    def wait() -> float:
        work.wait()
        if failure is not None:
            raise failure
        weight = float(total)
        if weight != weight:
            raise BatchError(
                "step: batch must be countable on every rank; another rank's error says why"
            )
        return int(weight) if weight.is_integer() else weight

    return parts, weights, wait


def mean_together(
    state: DistState, losses: Sequence[Tensor], shares: Sequence[float]
) -> Callable[[], Tensor]:
    """Start to sum losses times their shares of the global weight; a function that waits for it."""
    if not any(shares):
        mean = torch.zeros((), device=state.device)
    else:
        mean = losses[0].float() * shares[0]
        for loss, share in zip(losses[1:], shares[1:], strict=True):
            mean.add_(loss, alpha=share)
    if state.world_size == 1:
        return lambda: mean
    work = _comm.start_sum(mean, state, "step")

    def wait() -> Tensor:
        work.wait()
        return mean

    return wait
