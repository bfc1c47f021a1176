"""Select a few rows of a batch, and cut them into parts for a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from accel_fn.checks.collated import Recollated
from accel_fn.core import primitives
from accel_fn.core.batch import Samples, count_samples, opened, tensors_of
from accel_fn.core.collectives import broadcast
from accel_fn.core.given_batches import origin_of
from accel_fn.core.loop import Strategy
from accel_fn.core.plan import Plan
from accel_fn.core.split_batch import interleaved_parts, part_sizes, split_batch, split_rows
from accel_fn.core.state import DistState, data_places
from accel_fn.core.weights import Weight, weigh
from accel_fn.parallel.gather import gather

_NUM_SAMPLES = 8


class Rows(NamedTuple):
    """A few rows of a batch, their number, and the number on the rank with the fewest."""

    batch: Any
    num: int
    fewest: int
    collate: Callable[[Sequence[int]], Any] | None = None
    """Makes the batch of some of the samples, if the rows are samples of a loader."""


def few_rows(
    plan: Plan, strategy: Strategy, state: DistState, batch: Any, *, leaves_out: bool
) -> Rows | None:
    """Return a few rows, two or more; None on all ranks if there are fewer, or if the step will raise.

    If a rank has fewer than two rows, all ranks get the rows of one rank, or those of all ranks
    together.
    """
    whole, part, num = counted(plan, strategy, batch)
    num = -1 if leaves_out else num
    # All ranks must run the same number of forwards: FSDP unshards in each forward, and a loss may
    # call collectives.
    counts = primitives.exchange(num, state, "step")
    if min(counts) < 0:
        return None
    if max(counts) < 2:
        num = sum(counts[data_places(state)])
        return Rows(joined(whole, state), num, num) if num > 1 else None
    if min(counts) < 2:
        source = [each > 1 for each in counts].index(True)
        part = broadcast(part, state, source=source)
        counts = [counts[source]]
    return Rows(part, count_samples(part), min(counts))


def counted(plan: Plan, strategy: Strategy, batch: Any) -> tuple[Any, Any, int]:
    """Return the batch, some samples and their number: 0 if unknown, -1 if the step will raise."""
    try:
        strategy.parameters.check()
    except Exception:
        return None, None, -1
    try:
        # Do not call the plan's split: the user may have written it to be called once per batch. A
        # list is one batch, since torch's collate returns a list for samples that are pairs. Only
        # with windows, a list holds micro-batches.
        is_window = bool(plan.having("takes_windows"))
        whole = batch[0] if is_window and type(batch) is list else batch
        num = 0 if whole is None else count_samples(whole)
        if num and not strategy.can_run(plan, whole):
            return None, None, -1
        if num < 2:
            return whole, None, num
        part = split_batch(whole, max(1, num // _NUM_SAMPLES))[0]
        return whole, part, count_samples(part)
    except Exception:
        # Return no rows: either the step refuses the batch too, or the rows cannot be cut.
        return None, None, 0


def halves_of(
    plan: Plan, strategy: Strategy, batch: Any
) -> tuple[Any, Sequence[Any], Sequence[Weight]] | None:
    """Return a few rows, their halves with a weight, and the weights; None without two halves."""
    _, rows, num = counted(plan, strategy, batch)
    if num < 2:
        return None
    parts = split_batch(rows, 2)
    pairs = [each for each in zip(parts, weigh(plan.weight_fn, parts), strict=True) if each[1]]
    return (rows, *zip(*pairs, strict=True)) if len(pairs) > 1 else None


def joined(batch: Any, state: DistState) -> Any:
    """Gather the rows of all ranks; a list with tensors is not a column, unless it is `Samples`."""

    def is_column(node: Any) -> bool:
        return type(node) is Samples or (type(node) is list and not tensors_of(node))

    leaves, form = pytree.tree_flatten(opened(batch, is_column), is_column)
    return pytree.tree_unflatten([*gather(tuple(leaves), state)], form)


def collated_samples(plan: Plan, state: DistState, batch: Any) -> Rows | None:
    """Return some samples to collate again; None on all ranks if one has fewer than two."""
    is_window = bool(plan.having("takes_windows"))
    origin = origin_of(batch[0] if is_window and type(batch) is list and batch else batch)
    num = 0 if origin is None else min(origin.num_samples, _NUM_SAMPLES)
    fewest = min(primitives.exchange(num, state, "step"))
    if fewest < 2 or origin is None:
        return None
    found = Recollated(origin, state)
    return Rows(None, num, fewest, found)


class Parts(NamedTuple):
    """A cut of rows: the parts, and for each part the places of its rows."""

    parts: Sequence[Any]
    rows: Sequence[Sequence[int]]


def _cut(rows: Rows, how: str) -> Parts:
    """Cut rows into halves, alternating rows, thirds, or three quarters and one."""
    num = rows.num
    sizes = {
        "halves": part_sizes(num, 2),
        "in turn": part_sizes(num, 2),
        "thirds": part_sizes(num, 3),
        "unequal": [num - num // 4, num // 4],
    }[how]
    if how == "in turn":
        places: list[Sequence[int]] = [range(0, num, 2), range(1, num, 2)]
    else:
        stops = accumulate(sizes)
        places = [range(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    if rows.collate is not None:
        return Parts([rows.collate(each) for each in places], places)
    if how == "in turn":
        return Parts(interleaved_parts(rows.batch, 2), places)
    return Parts(split_rows(rows.batch, sizes), places)


def _cuts(rows: Rows, names: Sequence[str], *, most: int) -> list[Parts]:
    """Cut the rows in up to `most` of the named ways, the first ones for which every rank has enough rows."""
    least = {"halves": 2, "in turn": 3, "thirds": 6, "unequal": 4}
    found = [name for name in names if rows.fewest >= least[name]]
    # With few rows, alternating rows may agree while halves do not, so always add halves.
    found = [*dict.fromkeys([*found, "halves"])]
    return [_cut(rows, name) for name in found[:most]]


def prepared(rows: Rows, names: Sequence[str], *, most: int) -> tuple[Rows, list[Parts]]:
    """Collate the rows if they are samples of a loader, and cut them in up to `most` of the named ways."""
    if rows.collate is not None:
        rows = rows._replace(batch=rows.collate(range(rows.num)))
    return rows, _cuts(rows, names, most=most)
