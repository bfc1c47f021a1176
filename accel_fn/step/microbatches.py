"""A batch as weighed micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from accel_fn.base.weights import weigh
from accel_fn.errors import BatchError, message
from accel_fn.step.plan import Plan
from accel_fn.step.trained_parameters import Settled

Parts = Sequence[Any]
Weights = Sequence[float]


def cut(plan: Plan, batch: Any) -> tuple[Parts, Weights]:
    """The micro-batches that count for something, and their weights."""
    if not plan.split:
        weight = _weigh(plan, batch)
        return ((batch,), (weight,)) if weight else ((), ())
    split = plan.split[0](batch)
    if not isinstance(split, list | tuple):
        _check_split(split)
    weighed = [(part, _weigh(plan, part)) for part in split]
    counted = [(part, weight) for part, weight in weighed if weight]
    return [part for part, _ in counted], [weight for _, weight in counted]


def _weigh(plan: Plan, part: Any) -> float:
    weight = weigh(plan.weight_fn, part)
    if part is None and weight:  # it stands for a rank without items: loss_fn would not be called
        repair = "use () where loss_fn needs none"
        raise BatchError(message("step", "batch", "be a batch", part, repair))
    return weight


def _check_split(split: object) -> None:
    """Refuse what cannot be gone through, or would be gone through by keys, letters or rows."""
    if not isinstance(split, Iterable) or isinstance(split, Mapping | str | Tensor):
        rule = "return a sequence of micro-batches"
        raise BatchError(message("step", "split", rule, type(split).__name__))


def cut_or_fail(
    plan: Plan, batch: Any, settled: Settled | None = None
) -> tuple[Parts, Weights, Exception | None]:
    """`cut`, or nothing and the reason: a failure is for all ranks to hear of before it is raised."""
    try:
        if settled is not None:
            settled.check()
        return *cut(plan, batch), None
    except Exception as error:
        return (), (), error
