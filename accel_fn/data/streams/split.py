"""Streams that can be split: the part that each worker reads, and the items that a rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torch.utils.data._utils.worker import WorkerInfo

from accel_fn.data.order import mix
from accel_fn.data.streams.pack import pack, unpack
from accel_fn.data.streams.read_stream import Stream, WorkerStream
from accel_fn.errors import ArgumentTypeError, message


@dataclass(frozen=True, slots=True)
class Split:
    """The division into shards: worker w of rank r is reader r * readers_per_rank + w."""

    kind: str  # "shard": by the data set's method; "workers": it splits itself by `get_worker_info`
    world_size: int
    readers_per_rank: int

    @property
    def num_readers(self) -> int:
        return self.world_size * self.readers_per_rank

    def open(
        self, data: IterableDataset[Any], reader: int, epoch: int, *, seed: int, in_worker: bool
    ) -> Stream:
        """Start one pass over a reader's shard."""
        own_seed = mix(seed + reader + 1)
        info = None
        if self.kind == "shard":
            data = shard_of(data, self.num_readers, reader)
        else:
            worker_seed = torch.initial_seed() if in_worker else own_seed
            info = WorkerInfo(
                id=reader, num_workers=self.num_readers, seed=worker_seed, dataset=data
            )
        return Stream(data, epoch, seed=own_seed, info=info, in_worker=in_worker)


def num_shards(data: Any) -> int | None:
    """Return the largest number of shards of a data set; None without such an attribute."""
    count = getattr(data, "num_shards", getattr(data, "n_shards", None))
    return count if isinstance(count, int) else None


def shard_of(data: Any, num_shards: int, index: int) -> IterableDataset[Any]:
    """Return one shard of a data set that can be split."""
    shard = data.shard(num_shards=num_shards, index=index)
    if not isinstance(shard, IterableDataset):
        rule, got = "return an IterableDataset", type(shard).__name__
        repair = 'or use split="round_robin"'
        raise ArgumentTypeError(message("shard_loader", "shard()", rule, got, repair))
    return shard


@dataclass(eq=False)
class ShardStream(WorkerStream):
    """A rank's shards: items in blocks, from a worker as bytes."""

    reads: ClassVar = "after {} items"

    split: Split
    block_size: int

    def __iter__(self) -> Iterator[Any]:
        epoch = int(self.place[0])  # now: a persistent worker's place moves on
        info = self.worker()
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
        """Remove and return the items read last: those that other ranks get."""
        kept = len(self) - count
        self._items, taken = self._items[:kept], self._items[kept:]
        return taken

    def add(self, items: list[Any]) -> None:
        """Add items that other ranks sent."""
        self._items += items
