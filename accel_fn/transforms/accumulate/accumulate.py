"""accumulate: run a batch as several micro-batches, with memory for only one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from accel_fn.core.plan import SlotFunction, Stateful
from accel_fn.core.split_batch import split_batch
from accel_fn.core.state import DistState
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchError,
    check_count,
    message,
)
from accel_fn.parallel.launch_options import launch_options, source_of
from accel_fn.transforms.accumulate.retry_on_oom import FittingSplit, RetryOnOOM


@transform
def accumulate(
    num_microbatches: int | Literal["auto"] | None = None,
    *,
    split: Callable[[Any], Sequence[Any]] | Literal["rows"] | None = "rows",
) -> Transform:
    """Compute the gradient of a batch in `num_microbatches` parts, in the memory of one.

    The parts are consecutive samples, as even as possible; a batch of fewer samples gives fewer
    parts. Each part counts by its weight, so the gradient is the gradient of the whole batch, to
    rounding, also if sizes do not divide evenly.

    Law: the identity, for every number of micro-batches, to rounding: gradients of parameters in half
    precision are added up in float32.
    Tests: `tests/laws/law02_accumulation.py`, `tests/laws/law02_half_precision.py`.

    Args:
        num_microbatches: >= 1; default: the launch's (`--num-microbatches` or
            ACCEL_FN_NUM_MICROBATCHES), else one. "auto" starts with one; if any rank runs out of
            memory, all ranks repeat the batch in twice as many, and keep the number.
            `report.extras["num_microbatches"]` is the number; a checkpoint keeps it for the same
            world size.
        split: "rows" cuts along the leading dimension. A function `batch -> micro-batches`
            may return any number of parts. None is for data that cannot be split: the step gets
            a list of at most `num_microbatches` batches, as `group_batches` makes them.

    Returns:
        A transform.

    Raises:
        ValueError: `num_microbatches` is not an integer >= 1 (a TypeError too if it is not an
            integer). From the step, on all ranks, with `split=None`: a batch is not a list, or too
            long. With other splits: a loader's batch has its samples in dimension 1, and the
            default weight counts dimension 0. In `build`, with "auto": together with `wrap_fsdp` in
            a world of several, or with `reproducible`.
        MemoryError: from the step, on all ranks, with "auto": one sample does not fit.
        TypeError: `split` is not one of these.

    Cost: one forward and backward per micro-batch; gradients are averaged once, in the last. For
    parameters in half precision, the sums take 4 bytes per parameter, and one read and write for
    each micro-batch. "auto" adds a copy of buffers and of random generators' states, and in a world
    of several a small collective; with `wrap_ddp`, averaging gradients then overlaps with no
    backward.

    >>> import accel_fn as af
    >>> af.accumulate(4)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, split=[accumulate(4)])
    """
    if num_microbatches == "auto":
        return _automatic(split)
    source = "" if num_microbatches is not None else source_of("num_microbatches")
    if num_microbatches is None:
        num_microbatches = launch_options().num_microbatches
        if num_microbatches is None and split == "rows":
            return fill(init_state=SlotFunction(one_microbatch).with_source(source))
    given = 1 if num_microbatches is None else num_microbatches
    num_parts = check_count("accumulate", "num_microbatches", given)
    if split is None:
        return fill(split=WindowSlot(check_list, at_most=num_parts).with_source(source))
    if callable(split):
        return fill(split=split)
    if split == "rows":
        return fill(split=SlotFunction(split_batch, num_parts=num_parts).with_source(source))
    rule = 'be a function batch -> micro-batches, "rows" or None'
    raise ArgumentTypeError(message("accumulate", "split", rule, split))


def _automatic(split: object) -> Transform:
    if split != "rows":
        rule = 'be "rows" where num_microbatches is "auto"'
        raise ArgumentError(message("accumulate", "split", rule, split))
    return fill(split=RetrySlot(FittingSplit), wrap_grad_fn=RetrySlot(RetryOnOOM))


class WindowSlot(SlotFunction):
    """A split for batches that are lists of micro-batches."""

    traits = frozenset({"takes_windows"})


class RetrySlot(Stateful):
    """A slot function of `accumulate("auto")`.

    Because of its trait, strategies exchange failures before they average gradients.
    """

    traits = frozenset({"retries"})


def one_microbatch(state: DistState) -> DistState:
    """Return the state unchanged. `explain` prints this function, to show the setting of the launch."""
    return state


def check_list(batch: Any, *, at_most: int) -> list[Any]:
    """Return the micro-batches of a batch; refuse a batch that is not a list of micro-batches."""
    # Refuse a tuple too: a tuple is one batch, of inputs and targets.
    if type(batch) is not list:
        rule, repair = (
            "be a list of micro-batches",
            "accumulate(split=None) takes what group_batches gives",
        )
        raise BatchError(message("step", "batch", rule, type(batch).__name__, repair))
    if len(batch) > at_most:
        rule = f"be a list of at most {at_most} micro-batches"
        repair = f"use accumulate({len(batch)}, split=None), or a smaller window"
        raise BatchError(message("step", "batch", rule, len(batch), repair))
    return batch
