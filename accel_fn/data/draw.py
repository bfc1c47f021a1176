"""draw: draw random numbers for a global batch, such as noise, and take this rank's rows of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

from accel_fn.core.batch import count_samples, shapes_of
from accel_fn.core.primitives import exchange_number
from accel_fn.core.restored import generator_of
from accel_fn.core.split_batch import split_rows
from accel_fn.core.state import DistState, check_state, data_places
from accel_fn.data.shard_batch import shard_batch
from accel_fn.errors import ArgumentError, ArgumentTypeError, BatchError, message
from accel_fn.parallel.cp.draws import is_of_block

T = TypeVar("T")


def draw(fn: Callable[..., T], state: DistState, name: str = "", *, rows: object = ()) -> T:
    """Draw random numbers for a global batch, and take this rank's rows of them.

    Every rank draws the rows of the whole batch, from one generator that is seeded by `state.seed`,
    `state.step`, `state.call` and `name`, and keeps its part, as `shard_batch` cuts it. Draw in the loop and
    put the rows into the batch: then `accumulate` cuts them as it cuts the other rows. In a loss, a
    micro-batch would not know which rows of the global batch it has.

    Two draws for one step need two names, or they return the same numbers.

    Law: the draws of the ranks, joined, are the draw of one rank, for every number of ranks. A run
    that resumes from a checkpoint draws the same numbers as an uninterrupted run.
    Tests: `tests/laws/law03_draws.py`.

    Args:
        fn: draws from the generator, which is on the host, and returns a tree of tensors
            [num_rows, ...], as many rows as the *global* batch has: the DataLoader's `batch_size`. With
            `rows`, it is called as `fn(generator, num_rows)`.
        state: the state of the step that the rows are for.
        name: the name of the draw.
        rows: this rank's part of the batch that the numbers are for. The batch may be shorter than
            the others, as the last one of an epoch is; None is a part without rows. Every rank
            passes its part, and gets as many rows as the part has.

    Returns:
        The tree with this rank's rows, on the host; `place` moves them with the batch. Where the
        device should draw, let `fn` draw a seed for a generator of the device.

    Raises:
        TypeError: `fn` is not callable, or `name` is not a string.
        ValueError: `fn` returns no rows, different numbers of them, or rows that it did not draw from
            the generator; `rows` cannot be counted; it is called in a loss under `wrap_cp`.

    Cost: `fn` for the whole batch on every rank, and some microseconds; no message without `rows`, with
    them one small collective in a world of several.

    >>> import torch, accel_fn as af
    >>> state = af.DistState(rank=1, world_size=2)
    >>> noise = af.draw(lambda generator: torch.randn(6, 16, generator=generator), state)
    >>> noise.shape
    torch.Size([3, 16])
    >>> def noise_of(generator, num_rows):
    ...     return torch.randn(num_rows, 16, generator=generator)
    >>> af.draw(noise_of, af.DistState(), rows={"image": torch.zeros(5, 3)}).shape
    torch.Size([5, 16])
    """
    check_state("draw", state)
    if is_of_block():
        raise BatchError(
            "draw: must be called in the loop where wrap_cp cuts sequences, got a call in the loss, whose "
            "tokens are one block; put the numbers into the batch, and name them in dims"
        )
    if not callable(fn):
        rule, repair = (
            "be a function of a generator",
            "such as lambda g: torch.rand(8, generator=g)",
        )
        raise ArgumentTypeError(message("draw", "fn", rule, type(fn).__name__, repair))
    if not isinstance(name, str):
        raise ArgumentTypeError(message("draw", "name", "be a string", name))
    generator = generator_of(state, name)
    before = generator.get_state()
    sizes = None if type(rows) is tuple and not rows else _sizes(rows, state)
    drawn = fn(generator) if sizes is None else fn(generator, sum(sizes))
    shapes = shapes_of(drawn)
    counts = {shape[0] for shape in shapes}
    if len(counts) != 1:
        rule, got = "return tensors of one number of rows", shapes or type(drawn).__name__
        raise BatchError(message("draw", "fn", rule, got))
    if sizes is not None and counts != {sum(sizes)}:
        rule = f"return as many rows as it is given, {sum(sizes)}"
        raise BatchError(message("draw", "fn", rule, f"{next(iter(counts))} rows"))
    # With one row or none, `fn` may be right to draw nothing, such as for a permutation of one row.
    if counts.pop() > 1 and torch.equal(generator.get_state(), before):
        rule, repair = "draw from the generator that it is given", "torch.randn(..., generator=g)"
        raise ArgumentError(message("draw", "fn", rule, "none of its numbers", repair))
    if sizes is None:
        return shard_batch(drawn, state)
    return cast("T", split_rows(drawn, sizes, "draw")[state.data.rank])


def _sizes(rows: object, state: DistState) -> list[int]:
    """Return the number of rows of each rank; if one rank cannot count its rows, all raise."""
    failure: Exception | None = None
    try:
        count = count_samples(rows)
    except Exception as error:
        count, failure = -1, error
    counts = [count] if state.world_size == 1 else exchange_number(count, state, "draw")
    if failure is not None:
        raise failure
    if min(counts) < 0:
        raise BatchError("draw: rows must be countable, got others on another rank")
    return counts[data_places(state)]
