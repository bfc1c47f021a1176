"""Uneven shards: ranks agree on what each still holds, and what the longer ones hold is shared out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from accel_fn.base.batch import part_sizes
from accel_fn.comm.channel import Channel
from accel_fn.data.streams.pack import pack, unpack
from accel_fn.data.streams.round_robin import Cut
from accel_fn.data.streams.split import Shard

_MOST = 4  # batches between two agreements; a rank holds about one part more than that


@dataclass(frozen=True, slots=True)
class _Holding:
    """What a rank says of its shard."""

    count: int
    ended: bool


def even_parts(shard: Shard, cut: Cut, channel: Channel) -> Iterator[list[Any]]:
    """A rank's part of every global batch of a stream whose shards the ranks read.

    Every item comes once, on some rank; all ranks get the same number of
    batches, each with a part that is even to one item. While every rank can
    fill its part from its own shard, nothing moves, and only every few batches the
    ranks say how much they hold.

    Raises on all ranks where one has come to `channel.fail`.
    """
    most, num_reading = 1, cut.world_size
    while True:
        # where all shards have ended, too: before a rank waits for what another gives, it hears of failures
        held, num_reading = _agree(shard, cut, channel, most, num_reading)
        num_batches, size = _next_batches(sum(held), cut, most)
        if num_batches == 0:
            return
        sizes = part_sizes(size, cut.world_size)
        moves, _ = plan_moves(held, [num_batches * part for part in sizes])
        _move(shard, moves, channel)
        for _ in range(num_batches):
            yield shard.take(sizes[channel.state.rank])
        # where few read for all, they hold no more at a time than where all do
        share = (_MOST + 1) * (num_reading or cut.world_size) // cut.world_size
        most = max(1, min(2 * most, _MOST, share))


def _next_batches(held: int, cut: Cut, most: int) -> tuple[int, int]:
    """How many global batches come next, none at the end, and how many items each has."""
    if held >= cut.batch_size + cut.num_ahead:
        return min(most, (held - cut.num_ahead) // cut.batch_size), cut.batch_size
    size = held if held >= cut.batch_size else cut.last(held, is_first=True)
    return min(size, 1), size


def _agree(
    shard: Shard, cut: Cut, channel: Channel, num_batches: int, num_reading: int
) -> tuple[list[int], int]:
    """What every rank holds, once that makes so many batches or is all there is; how many read on?"""
    size = part_sizes(cut.batch_size, cut.world_size)[channel.state.rank]
    enough = num_batches * cut.batch_size + cut.num_ahead
    wanted = max((num_batches + 1) * size, -(-enough // max(1, num_reading)))
    while True:
        shard.fill(wanted)
        said: list[_Holding] = channel.exchange(_Holding(len(shard), shard.ended))
        held = [each.count for each in said]
        num_reading = sum(not each.ended for each in said)
        if sum(held) >= enough or not num_reading:
            return held, num_reading
        wanted = len(shard) + -(-(enough - sum(held)) // num_reading)


def plan_moves(
    held: Sequence[int], needs: Sequence[int]
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Who gives how many items to whom, so that every rank has what it needs; what is left to each.

    A move is (source, target, count). Whoever has most beyond its own need
    gives first; the plan is the same on all ranks.
    """
    left = [has - need for has, need in zip(held, needs, strict=True)]
    moves = []
    for target in [rank for rank, count in enumerate(left) if count < 0]:
        while left[target] < 0:
            source = max(range(len(left)), key=lambda rank: left[rank])
            count = min(left[source], -left[target])
            moves.append((source, target, count))
            left[source] -= count
            left[target] += count
    return moves, left


def _move(shard: Shard, moves: Sequence[tuple[int, int, int]], channel: Channel) -> None:
    """Send and receive as planned; where an item cannot travel, raise on all ranks before one is used."""
    if not moves:
        return
    rank, failure, sent = channel.state.rank, None, []
    for source, target, count in moves:
        if source == rank:
            block = None
            try:
                block = pack(shard.take_newest(count)).numpy().tobytes()
            except Exception as error:
                error.add_note("shard_loader: items must be picklable to go to another rank")
                failure = error
            sent += channel.send(block, target)
    for source, target, _ in moves:
        if target == rank:
            block = channel.receive(source)
            try:
                shard.add([] if block is None else unpack(block))
            except Exception as error:
                failure = error
    for work in sent:
        work.wait()
    if failure is not None:
        raise failure
    channel.exchange(None)
