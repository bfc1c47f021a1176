"""Sources that can be split: which part of one a worker reads, and what a rank holds of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torch.utils.data._utils.worker import WorkerInfo

from accel_fn.data.order import mix
from accel_fn.data.streams.pack import pack, unpack
from accel_fn.data.streams.read_stream import Stream, worker_over
from accel_fn.data.workers.progress import Progress
from accel_fn.errors import ArgumentTypeError, message


@dataclass(frozen=True, slots=True)
class Split:
    """Who reads what: reader w of rank r is number r * readers_per_rank + w of all.

    Attributes:
        way: "shard" for a data set with a method that splits it, "workers" for
            one that asks `get_worker_info`.
        world_size: number of ranks.
        readers_per_rank: processes that read on each.
    """

    way: str
    world_size: int
    readers_per_rank: int

    @property
    def num_readers(self) -> int:
        """On all ranks together."""
        return self.world_size * self.readers_per_rank

    def open(
        self, data: IterableDataset[Any], reader: int, epoch: int, *, seed: int, in_worker: bool
    ) -> Stream:
        """One pass over what a reader reads."""
        own_seed = mix(seed + reader + 1)
        info = None
        if self.way == "shard":
            data = shard_of(data, self.num_readers, reader)
        else:
            worker_seed = torch.initial_seed() if in_worker else own_seed
            info = WorkerInfo(
                id=reader, num_workers=self.num_readers, seed=worker_seed, dataset=data
            )
        return Stream(data, epoch, seed=own_seed, info=info, in_worker=in_worker)


def num_shards(data: Any) -> int | None:
    """How many shards a data set has at most; None where it does not say."""
    count = getattr(data, "num_shards", getattr(data, "n_shards", None))
    return count if isinstance(count, int) else None


def shard_of(data: Any, num_shards: int, index: int) -> IterableDataset[Any]:
    """One shard of a data set that can be split."""
    shard = data.shard(num_shards=num_shards, index=index)
    if not isinstance(shard, IterableDataset):
        rule = "return an IterableDataset"
        repair = 'or use split="turns"'
        raise ArgumentTypeError(
            message("shard_loader", "shard()", rule, type(shard).__name__, repair)
        )
    return shard


class ShardStream(IterableDataset[Any]):
    """What a loader's workers read: items in blocks, from a worker as bytes."""

    progress: Progress | None = None  # where workers write how many items they have read

    def __init__(
        self,
        place: Tensor,
        data: IterableDataset[Any],
        split: Split,
        rank: int,
        seed: int,
        block_size: int,
    ) -> None:
        self.data = data
        self.split = split
        self.rank = rank
        self.seed = seed
        self.block_size = block_size
        self.place = place

    def __iter__(self) -> Iterator[Any]:
        epoch = int(self.place[0])  # now: a persistent worker's place moves on
        info = worker_over(self)
        reader = self.rank * self.split.readers_per_rank + (info.id if info else 0)
        return self._blocks(epoch, reader, in_worker=info is not None)

    def _blocks(self, epoch: int, reader: int, *, in_worker: bool) -> Iterator[Any]:
        stream = self.split.open(self.data, reader, epoch, seed=self.seed, in_worker=in_worker)
        for num_read in count(step=self.block_size):
            if self.progress is not None and in_worker:
                self.progress.begin(num_read)
            with stream.reading():
                items = stream.take(self.block_size)
            if not items:
                return
            yield pack(items) if in_worker else items

    def where(self, worker: int, epoch: int) -> str:
        """In words, what a worker reads."""
        at = None if self.progress is None else self.progress.of(worker)
        return f" after {at[0]} items of epoch {epoch}" if at else ""


class Shard:
    """The items of a rank's own shard that are read and not used yet."""

    def __init__(self, blocks: Iterator[Any]) -> None:
        self._blocks = blocks
        self._items: list[Any] = []
        self.ended = False

    def __len__(self) -> int:
        return len(self._items)

    def fill(self, count: int) -> None:
        """Read until `count` items are held, or the shard ends."""
        while len(self) < count and not self.ended:
            block = next(self._blocks, None)
            if block is None:
                self.ended = True
            else:
                self._items += unpack(block) if isinstance(block, Tensor) else block

    def take(self, count: int) -> list[Any]:
        """The oldest items."""
        taken, self._items = self._items[:count], self._items[count:]
        return taken

    def take_newest(self, count: int) -> list[Any]:
        """The items read last: those that others get."""
        kept = len(self) - count
        self._items, taken = self._items[:kept], self._items[kept:]
        return taken

    def add(self, items: list[Any]) -> None:
        """Items of another rank's shard."""
        self._items += items
