"""The micro-batches of a batch and their weights, counted before the first forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from accel_fn.core.batch import rows_of, tensors_of
from accel_fn.core.observers import FailedBatch
from accel_fn.core.plan import Plan
from accel_fn.core.torch_internals import is_memory
from accel_fn.core.weights import Weight, weigh
from accel_fn.errors import BatchError, OutOfMemoryError, message

Parts = Sequence[Any]
Weights = Sequence[Weight]


def microbatches(
    plan: Plan, batch: Any, *, with_weightless: bool = False
) -> tuple[Parts, Weights, int]:
    """Return the micro-batches of positive weight, their weights, and the batch's number of rows.

    With `with_weightless`, micro-batches that have samples but weight 0 come first.
    """
    # Split and weigh the batch before it is placed: the host then counts weights without waiting
    # for an accelerator, and the device holds only one micro-batch at a time.
    split, rows = cut(plan, batch)
    weights = weigh(plan.weight_fn, split)
    if all(weights):
        return split, weights, rows
    counted = [each for each in zip(split, weights, strict=True) if each[1]]
    if with_weightless:
        # Keep micro-batches of weight 0: a parameter that only these reach then gets a gradient of
        # zeros, as on one rank, and not None.
        weightless = [part for part, weight in zip(split, weights, strict=True) if not weight]
        counted = [*((part, ()) for part in weightless if _has_samples(part)), *counted]
    return [part for part, _ in counted], [weight for _, weight in counted], rows


def cut(plan: Plan, batch: Any) -> tuple[Parts, int]:
    """Split a batch; return its micro-batches, except empty ones of `Samples`, and its number of rows."""
    if batch is None:
        return (), 0
    if type(batch) is FailedBatch:
        raise batch.error
    split = plan.split[0](batch) if plan.split else (batch,)
    if not isinstance(split, list | tuple):
        _check_split(split)
    counts = [*map(rows_of, split)]
    if None in counts:
        split = [part for part, rows in zip(split, counts, strict=True) if rows is not None]
    return split, sum(filter(None, counts))


def splits_of(plan: Plan) -> list[Any]:
    """Return the plan's `split`; an empty list if it returns the whole batch as one part."""
    return [each for each in plan.split if getattr(each, "keywords", {}).get("num_parts") != 1]


def in_microbatches(plan: Plan) -> bool:
    """Return whether a rank computes its part of a batch in several forwards."""
    return bool(splits_of(plan) or plan.having("virtual_ranks"))


def _has_samples(part: Any) -> bool:
    return any(tensor.numel() for tensor in tensors_of(part))


def _check_split(split: object) -> None:
    """Refuse a result of `split` that is not iterable, or that is a mapping, a string or a tensor."""
    if not isinstance(split, Iterable) or isinstance(split, Mapping | str | Tensor):
        rule = "return a sequence of micro-batches"
        raise BatchError(message("step", "split", rule, type(split).__name__))


def microbatches_or_failure(
    plan: Plan, batch: Any, check: Callable[[], None] | None = None, *, retries: bool = False
) -> tuple[Parts, Weights, int, Exception | None]:
    """Call `microbatches`; return its error instead of raising it, since one rank must not raise alone.

    A step passes `check`, a check of its parameters. With `check`, the result includes micro-batches
    of weight 0.
    """
    try:
        if check is not None:
            check()
        return *microbatches(plan, batch, with_weightless=check is not None), None
    except Exception as error:
        return (), (), 0, _not_retried(error) if retries else error


def _not_retried(failure: Exception) -> Exception:
    """Replace an OOM error by one that is not retried.

    With this error, all ranks raise as soon as they have exchanged weights. So no rank may retry.
    """
    if not is_memory(failure):
        return failure
    error = OutOfMemoryError(
        f"step: batch must be split and weighed within memory, got {failure!r}; use a smaller batch"
    )
    error.__cause__ = failure
    return error
