"""Uneven shards: ranks agree on what each still holds, and what the longer ones hold is shared out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from accel_fn._batch import part_sizes
from accel_fn._channel import Channel
from accel_fn._errors import ReplicaError
from accel_fn.data._packing import pack, unpack
from accel_fn.data._shards import Shard
from accel_fn.data._turns import Cut

_MOST_PLAIN = 4  # batches between two agreements: as many parts, and one more, are held by then


@dataclass(frozen=True, slots=True)
class _Holding:
    """What a rank says of its shard."""

    count: int
    ended: bool
    failure: str | None


def even_parts(shard: Shard, cut: Cut, channel: Channel) -> Iterator[list[Any]]:
    """A rank's part of every global batch of a stream whose shards the ranks read.

    Every item comes once, on some rank; all ranks get the same number of
    batches, each with a part that is even to one item. While every rank can
    fill its part from its own shard, nothing moves, and only every few batches the
    ranks say how much they hold.

    Raises on all ranks where one shard fails.
    """
    sizes = part_sizes(cut.batch_size, cut.world_size)
    size = sizes[channel.state.rank]
    wanted, is_first = 2 * size, True
    while True:
        held, num_reading = _agree(shard, cut, channel, wanted=wanted)
        num_plain = min(count // each for count, each in zip(held, sizes, strict=True)) - 1
        for _ in range(num_plain):
            yield shard.take(size)
        if num_plain < 1:
            needs = part_sizes(_next_size(sum(held), cut, is_first=is_first), cut.world_size)
            if not any(needs):
                return
            _move(shard, plan_moves(held, needs), channel)
            yield shard.take(needs[channel.state.rank])
        is_first = False
        wanted = (min(2 * max(num_plain, 0), _MOST_PLAIN) + 1) * size
        if num_reading:  # when others have ended, one round is enough to know the next batch
            wanted = max(wanted, -(-_enough(cut) // num_reading))


def _enough(cut: Cut) -> int:
    """Items that ranks must hold together to know what the next batch is."""
    return cut.batch_size + cut.num_ahead


def _next_size(held: int, cut: Cut, *, is_first: bool) -> int:
    """Items of the next global batch: 0 for none, more than a full one where a tail joins it."""
    if held >= _enough(cut):
        return cut.batch_size
    return held if held >= cut.batch_size else cut.last(held, is_first=is_first)


def _agree(shard: Shard, cut: Cut, channel: Channel, *, wanted: int) -> tuple[list[int], int]:
    """What every rank holds, once that says what the next batch is; how many shards go on?"""
    while True:
        shard.fill(wanted)
        failure = None if shard.failure is None else repr(shard.failure)
        said: list[_Holding] = channel.exchange(_Holding(len(shard), shard.ended, failure))
        _raise_alike(shard.failure, [each.failure for each in said])
        held = [each.count for each in said]
        missing, num_reading = _enough(cut) - sum(held), sum(not each.ended for each in said)
        if missing <= 0 or not num_reading:
            return held, num_reading
        wanted = len(shard) + -(-missing // num_reading)


def plan_moves(held: Sequence[int], needs: Sequence[int]) -> list[tuple[int, int, int]]:
    """Who gives how many items to whom, so that every rank has what it needs: (source, target, count).

    Whoever has most beyond its own need gives first; the plan is the same on all ranks.
    """
    spare = [has - need for has, need in zip(held, needs, strict=True)]
    moves = []
    for target in [rank for rank, count in enumerate(spare) if count < 0]:
        while spare[target] < 0:
            source = max(range(len(spare)), key=lambda rank: spare[rank])
            count = min(spare[source], -spare[target])
            moves.append((source, target, count))
            spare[source] -= count
            spare[target] += count
    return moves


def _move(shard: Shard, moves: Sequence[tuple[int, int, int]], channel: Channel) -> None:
    """Send and receive as planned; where an item cannot travel, raise on all ranks."""
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
    said = channel.exchange(None if failure is None else repr(failure))
    _raise_alike(failure, said)


def _raise_alike(failure: Exception | None, said: Sequence[str | None]) -> None:
    """Raise on every rank where one has failed: its own exception there, its words elsewhere."""
    if failure is not None:
        raise failure
    for rank, words in enumerate(said):
        if words is not None:
            raise ReplicaError(f"shard_loader: the stream failed on rank {rank}: {words}")
