"""plan_batches: compute the sizes of an epoch's batches, parts and micro-batches before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isqrt

from accel_fn.core.split_batch import part_sizes
from accel_fn.data.order import Cut, check_sizes
from accel_fn.errors import check_count


@dataclass(frozen=True, slots=True, repr=False)
class BatchPlan:
    """Division of an epoch into batches, ranks' parts and micro-batches. Made by `plan_batches`.

    Its `repr` is a table. If no batch is full, the sizes of a full batch are empty.

    Attributes:
        num_samples: samples in the data set.
        batch_size: samples in a full global batch.
        world_size: ranks that share a batch.
        num_microbatches: micro-batches into which each rank cuts its part, at most.
        num_batches: steps of an epoch.
        num_full: batches of `batch_size` samples.
        last_batch: samples in the last batch.
        rank_sizes: samples of each rank in a full batch.
        last_rank_sizes: the same in the last batch.
        microbatch_sizes: for each rank, samples in its micro-batches of a full batch.
        last_microbatch_sizes: the same in the last batch.
        even_world_sizes: numbers of ranks that share a full batch evenly.
    """

    num_samples: int
    batch_size: int
    world_size: int
    num_microbatches: int
    num_batches: int
    num_full: int
    last_batch: int
    rank_sizes: tuple[int, ...]
    last_rank_sizes: tuple[int, ...]
    microbatch_sizes: tuple[tuple[int, ...], ...]
    last_microbatch_sizes: tuple[tuple[int, ...], ...]
    even_world_sizes: tuple[int, ...]

    def __repr__(self) -> str:
        full = (self.num_full, self.batch_size, self.rank_sizes, self.microbatch_sizes)
        last = (1, self.last_batch, self.last_rank_sizes, self.last_microbatch_sizes)
        lines = [("batches", "samples", "on each rank", "in each micro-batch")]
        lines += [_line(*full)] if self.num_full else []
        lines += [_line(*last)] if self.num_full < self.num_batches else []
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.rjust, line, widths)) for line in lines]
        ends = [
            f"{self.num_samples} samples, batches an epoch: {self.num_batches}",
            f"world sizes that share a batch evenly: {', '.join(map(str, self.even_world_sizes))}",
        ]
        return "\n".join([ends[0], *table, ends[1]])


def _line(
    count: int, size: int, ranks: Sequence[int], microbatches: Sequence[Sequence[int]]
) -> tuple[str, str, str, str]:
    return (
        str(count),
        str(size),
        _counted(ranks),
        _counted([part for row in microbatches for part in row]),
    )


def _counted(sizes: Sequence[int]) -> str:
    """Format sizes as `3 x 22, 5 x 21`, with larger sizes first."""
    groups = groupby(sorted(sizes, reverse=True))
    return ", ".join(f"{len(list(group))} x {size}" for size, group in groups)


def plan_batches(
    num_samples: int,
    batch_size: int,
    world_size: int = 1,
    num_microbatches: int = 1,
    *,
    drop_last: bool = False,
) -> BatchPlan:
    """Compute how `shard_loader` and `accumulate` will split an epoch, to print before training. Pure.

    Args:
        num_samples: samples in the data set, >= 1.
        batch_size: samples in a global batch, >= 1.
        world_size: ranks that share a batch, >= 1.
        num_microbatches: the number that you pass to `accumulate`, >= 1.
        drop_last: leave out a last batch that is not full.

    Returns:
        Sizes of batches, parts and micro-batches, and the numbers of ranks that fit the batch size.

    Raises:
        ValueError: a count is less than 1 (also a TypeError if it is not an integer), or
            `drop_last` leaves no batch.

    Cost: none; no data is read.

    >>> import accel_fn as af
    >>> af.data.plan_batches(1000, 64, world_size=6, num_microbatches=2)
    1000 samples, batches an epoch: 16
    batches  samples    on each rank  in each micro-batch
         15       64  4 x 11, 2 x 10        4 x 6, 8 x 5
          1       40    4 x 7, 2 x 6        4 x 4, 8 x 3
    world sizes that share a batch evenly: 1, 2, 4, 8, 16, 32, 64
    """
    counts = {
        "num_samples": num_samples,
        "batch_size": batch_size,
        "world_size": world_size,
        "num_microbatches": num_microbatches,
    }
    counts = {name: check_count("plan_batches", name, value) for name, value in counts.items()}
    num_samples, batch_size, world_size, num_microbatches = counts.values()
    cut = Cut(batch_size, world_size, drop_last)
    check_sizes("plan_batches", cut, num_samples)
    num_batches = cut.count(num_samples)
    last_batch = batch_size if drop_last else num_samples - (num_batches - 1) * batch_size
    num_full = num_batches if last_batch == batch_size else num_batches - 1
    ranks = tuple(part_sizes(batch_size, world_size)) if num_full else ()
    last_ranks = tuple(part_sizes(last_batch, world_size))
    return BatchPlan(
        **counts,
        num_batches=num_batches,
        num_full=num_full,
        last_batch=last_batch,
        rank_sizes=ranks,
        last_rank_sizes=last_ranks,
        microbatch_sizes=_microbatches(ranks, num_microbatches),
        last_microbatch_sizes=_microbatches(last_ranks, num_microbatches),
        even_world_sizes=_divisors(batch_size),
    )


def _microbatches(ranks: Sequence[int], num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of each rank's micro-batches: at most one per sample, and at least one."""
    return tuple(tuple(part_sizes(size, max(1, min(num_microbatches, size)))) for size in ranks)


def _divisors(number: int) -> tuple[int, ...]:
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))
