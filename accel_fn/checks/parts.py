"""A few rows of a batch, and their parts: what is compared, and how it is cut."""

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
    """A few rows of a batch, their number, and how many of them the rank with the fewest has."""

    batch: Any
    num: int
    fewest: int
    collate: Callable[[Sequence[int]], Any] | None = None
    """Makes the batch of some of them, where they are samples of a loader."""


def few_rows(
    plan: Plan, strategy: Strategy, state: DistState, batch: Any, *, leaves_out: bool
) -> Rows | None:
    """A few rows for this rank; None on all ranks where there are no two, or where the step will raise."""
    whole, part, num = counted(plan, strategy, batch)
    num = -1 if leaves_out else num
    # All ranks run as many forwards: FSDP unshards in each, and a loss may hold collectives.
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
    """The batch, a few of its samples, and their number: 0 if unknown, -1 if the step will raise."""
    try:
        strategy.parameters.check()
    except Exception:
        return None, None, -1
    try:
        # Not by the plan's split, which the user may have written to be called once per batch.
        # A list is one batch, as torch's collate makes it of pairs, unless it holds micro-batches.
        is_window = bool(plan.having("takes_windows"))
        whole = batch[0] if is_window and type(batch) is list else batch
        num = 0 if whole is None else count_samples(whole)
        if num < 2:
            return whole, None, num
        part = split_batch(whole, max(1, num // _NUM_SAMPLES))[0]
        return whole, part, count_samples(part)
    except Exception:  # the step refuses the batch, or its rows cannot be cut
        return None, None, 0


def halves_of(
    plan: Plan, strategy: Strategy, batch: Any
) -> tuple[Any, Sequence[Any], Sequence[Weight]] | None:
    """A few rows, their halves that weigh something, and the weights; None where there are no two."""
    _, rows, num = counted(plan, strategy, batch)
    if num < 2:
        return None
    parts = split_batch(rows, 2)
    pairs = [each for each in zip(parts, weigh(plan.weight_fn, parts), strict=True) if each[1]]
    return (rows, *zip(*pairs, strict=True)) if len(pairs) > 1 else None


def joined(batch: Any, state: DistState) -> Any:
    """The rows of all ranks; a list that holds tensors is no row, unless it is marked by `samples`."""

    def is_column(node: Any) -> bool:
        return type(node) is Samples or (type(node) is list and not tensors_of(node))

    leaves, form = pytree.tree_flatten(opened(batch, is_column), is_column)
    return pytree.tree_unflatten([*gather(tuple(leaves), state)], form)


def collated_samples(plan: Plan, state: DistState, batch: Any) -> Rows | None:
    """A few samples of this rank's part that its loader collates anew; None on all ranks without such."""
    is_window = bool(plan.having("takes_windows"))
    origin = origin_of(batch[0] if is_window and type(batch) is list and batch else batch)
    num = 0 if origin is None else min(origin.num_samples, _NUM_SAMPLES)
    fewest = min(primitives.exchange(num, state, "step"))
    if fewest < 2 or origin is None:
        return None
    found = Recollated(origin, state)
    return Rows(None, num, fewest, found)


class Parts(NamedTuple):
    """A cut of rows: the parts, and which rows each has."""

    parts: Sequence[Any]
    rows: Sequence[Sequence[int]]


def _cut(rows: Rows, how: str) -> Parts:
    """Cut rows in halves, by every second row, in thirds, or a quarter off."""
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
    """These cuts, of which all ranks have as many."""
    least = {"halves": 2, "in turn": 3, "thirds": 6, "unequal": 4}
    found = [name for name in names if rows.fewest >= least[name]]
    # Of few rows, each second one may be right where halves are not.
    found = [*dict.fromkeys([*found, "halves"])]
    return [_cut(rows, name) for name in found[:most]]


def prepared(rows: Rows, names: Sequence[str], *, most: int) -> tuple[Rows, list[Parts]]:
    """A few rows, with their batch, and their cuts."""
    if rows.collate is not None:
        rows = rows._replace(batch=rows.collate(range(rows.num)))
    return rows, _cuts(rows, names, most=most)
