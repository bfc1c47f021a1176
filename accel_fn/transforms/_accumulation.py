"""accumulate: the batch in several micro-batches, one after another in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from accel_fn._batch import split_batch
from accel_fn._errors import ArgumentTypeError, check_count, message
from accel_fn._plan import Plan, Transform


def accumulate(
    num_microbatches: int, *, split: Callable[[Any], Sequence[Any]] | None = None
) -> Transform:
    """Compute the gradient of a batch in `num_microbatches` parts, in the memory of one.

    The parts are consecutive samples, as even as can be; a batch of fewer
    samples gives fewer parts. Each counts by its weight, so the gradient is
    that of the whole batch, to rounding, whatever divides what.

    Law: the identity, for every number of micro-batches.

    Args:
        num_microbatches: >= 1.
        split: `batch -> micro-batches`, instead of cutting along the leading
            dimension; it may give any number of parts.

    Returns:
        A transform.

    Raises:
        ValueError: `num_microbatches` is no integer >= 1 (TypeError too where it is no integer).

    Cost: one forward and backward per micro-batch; the ranks talk once, in the last.

    >>> import accel_fn as af
    >>> af.accumulate(4)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=num_samples, split=[split_batch(num_parts=4)])
    """
    num_parts = check_count("accumulate", "num_microbatches", num_microbatches)
    if split is not None and not callable(split):
        raise ArgumentTypeError(
            message("accumulate", "split", "be a function batch -> micro-batches", split)
        )
    splitting = split or partial(split_batch, num_parts=num_parts)

    def accumulate_plan(plan: Plan) -> Plan:
        return replace(plan, split=(*plan.split, splitting))

    return accumulate_plan
