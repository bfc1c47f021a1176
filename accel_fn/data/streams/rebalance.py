"""Uneven shards: ranks agree on how many items each holds, and items move to ranks that hold fewer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accel_fn.core.split_batch import part_sizes
from accel_fn.data.empty_part import EmptyPart
from accel_fn.data.order import Cut
from accel_fn.data.streams.pack import pack, unpack
from accel_fn.parallel.messages import Channel

_MOST = 4  # batches between two agreements; a rank holds about one part more than that


class HeldItems:
    """The items of a rank's own shards that are read and not used yet."""

    def __init__(self, blocks: Iterator[Any]) -> None:
        self._blocks = blocks
        self._items: list[Any] = []
        self.ended = False

    def __len__(self) -> int:
        return len(self._items)

    def fill(self, count: int) -> None:
        """Read until `count` items are held, or the shards end."""
        while len(self) < count and not self.ended:
            block = next(self._blocks, None)
            if block is None:
                self.ended = True
            else:
                self.add(unpack(block) if isinstance(block, Tensor) else block)

    def take(self, count: int) -> list[Any]:
        """Remove and return the oldest items."""
        taken, self._items = self._items[:count], self._items[count:]
        return taken

    def take_newest(self, count: int) -> list[Any]:
        """Remove and return the items read last, for other ranks; the oldest stay, to be used first."""
        kept = len(self) - count
        self._items, taken = self._items[:kept], self._items[kept:]
        return taken

    def first_of_main(self, channel: Channel) -> list[Any]:
        """Return the oldest item of rank 0, which has one where any rank has."""
        return unpack(
            channel.via_main(
                None, lambda ranks: [pack(self._items[:1]).numpy().tobytes()] * len(ranks)
            )
        )

    def add(self, items: list[Any]) -> None:
        """Add items that other ranks sent."""
        self._items += items


@dataclass(frozen=True, slots=True)
class _Holding:
    """A message to the peers: the number of items that this rank holds, and whether its shards have ended."""

    count: int
    ended: bool


def rebalanced_parts(held: HeldItems, cut: Cut, channel: Channel) -> Iterator[list[Any]]:
    """Yield a rank's part of every global batch of a stream whose shards the ranks read.

    Every item comes once, on some rank. All ranks get the same number of batches, each with a part
    that is even to one item, or empty. While every rank can fill its part from its own shards, nothing moves,
    and ranks exchange only how much they hold, every few batches.

    Raises on all ranks where one has come to `channel.fail`.
    """
    most, num_reading = 1, cut.world_size
    while True:
        # Also where all shards have ended: a failure must arrive before a rank waits for items.
        counts, num_reading = _agree(held, cut, channel, most, num_reading)
        num_batches, size = _next_batches(sum(counts), cut, most)
        if num_batches == 0:
            return
        sizes = part_sizes(size, cut.world_size)
        moves, _ = plan_moves(counts, [num_batches * part for part in sizes])
        _move(held, moves, channel)
        example = held.first_of_main(channel) if size < cut.world_size else []
        for _ in range(num_batches):
            yield held.take(sizes[channel.state.rank]) or EmptyPart(example)
        # Few ranks that still read for all must not hold more in memory than if all ranks read.
        limit = (_MOST + 1) * (num_reading or cut.world_size) // cut.world_size
        most = max(1, min(2 * most, _MOST, limit))


def _next_batches(count: int, cut: Cut, most: int) -> tuple[int, int]:
    """Return the number of global batches that come next (0 at the end), and the items in each."""
    size = cut.next_size(count)
    return min(most, max(count // cut.batch_size, min(size, 1))), size


def _agree(
    held: HeldItems, cut: Cut, channel: Channel, num_batches: int, num_reading: int
) -> tuple[list[int], int]:
    """Read until ranks hold so many batches; return how much each holds, and how many read on."""
    size = part_sizes(cut.batch_size, cut.world_size)[channel.state.rank]
    enough = num_batches * cut.batch_size
    wanted = max((num_batches + 1) * size, -(-enough // max(1, num_reading)))
    while True:
        held.fill(wanted)
        holdings: list[_Holding] = channel.exchange(_Holding(len(held), held.ended))
        counts = [each.count for each in holdings]
        num_reading = sum(not each.ended for each in holdings)
        if sum(counts) >= enough or not num_reading:
            return counts, num_reading
        wanted = len(held) + -(-(enough - sum(counts)) // num_reading)


def plan_moves(
    held: Sequence[int], needs: Sequence[int]
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Plan moves (source, target, count) that give every rank what it needs; and what each has left.

    The rank with most beyond its own need gives first. The plan is the same on all ranks.
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


def _move(held: HeldItems, moves: Sequence[tuple[int, int, int]], channel: Channel) -> None:
    """Send and receive as planned. If an item cannot be sent, raise on all ranks before one is used."""
    if not moves:
        return
    rank, failure, sent = channel.state.rank, None, []
    for source, target, count in moves:
        if source == rank:
            block = None
            try:
                block = pack(held.take_newest(count)).numpy().tobytes()
            except Exception as error:
                error.add_note("shard_loader: items must be picklable to go to another rank")
                failure = error
            sent += channel.send(block, target)
    for source, target, _ in moves:
        if target == rank:
            block = channel.receive(source)
            try:
                held.add([] if block is None else unpack(block))
            except Exception as error:
                failure = error
    # After the receiving: ranks that all waited first for their sends could deadlock.
    for work in sent:
        work.wait()
    if failure is not None:
        raise failure
    channel.exchange(None)
