"""Streams that can be split: every rank reads its own shards, and longer ones are rebalanced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.worker import WorkerInfo

from accel_fn.data.collate import Collate, ReadyBatch, WholeBatch
from accel_fn.data.order import Cut, mix
from accel_fn.data.streams.pack import pack
from accel_fn.data.streams.read_stream import Passes, Stream, WorkerInit, WorkerStream, options_of
from accel_fn.data.streams.rebalance import HeldItems, rebalanced_parts
from accel_fn.data.streams.stream_options import Split, StreamOptions, shard_of
from accel_fn.data.streams.stream_source import StreamSource
from accel_fn.data.workers import identity
from accel_fn.parallel.messages import Channel


class SplitSource(StreamSource):
    """A `Source`: every rank reads its own shards, and what longer ones still hold is rebalanced."""

    def __init__(
        self, loader: DataLoader[Any], options: StreamOptions, split: Split, channel: Channel
    ) -> None:
        super().__init__(loader, options, channel.state.rank)
        self._channel = channel
        splits_itself = split.kind == "workers"
        init = partial(
            WorkerInit,
            first=self._rank * split.readers_per_rank if splits_itself else None,
            num_workers=split.num_readers if splits_itself else 1,
        )
        kept = options_of(loader, init)
        if loader.num_workers:
            kept["num_workers"] = split.readers_per_rank
        # Workers give items in bytes; batches exist, and are pinned, only after the rebalancing.
        self._pinning = {name: kept.pop(name) for name in ("pin_memory", "pin_memory_device")}
        stream_of: Any = partial(
            ShardStream,
            data=loader.dataset,
            rank=self._rank,
            seed=options.seed,
            split=split,
            block_size=-(-self._cut.batch_size // self._cut.world_size),
        )
        self._passes = Passes(stream_of, kept, mix(options.seed) + self._rank)

    def _start(self, epoch: int, first_batch: int, *, keeps: bool) -> Iterator[Any]:
        channel = self._channel.another()
        batches = _collated(self._parts(channel, epoch, keeps=keeps), first_batch, self._collate)
        if not self._pinning["pin_memory"]:
            return channel.sending_errors(batches)
        pinning: DataLoader[Any] = DataLoader(
            _Once(batches),
            batch_size=None,
            collate_fn=identity,
            generator=torch.Generator(),  # else torch would draw from the user's global one
            **self._pinning,
        )
        return channel.sending_errors(iter(pinning))

    def _count(self, epoch: int) -> Iterator[Any]:
        channel = self._channel.another()
        return channel.sending_errors(self._parts(channel, epoch))

    def _parts(self, channel: Channel, epoch: int, *, keeps: bool = False) -> Iterator[list[Any]]:
        # From the start of the epoch: how items moved before decides what a rank holds now.
        return _parts(self._passes.start(epoch, 0, keeps=keeps), self._cut, channel)


def _parts(blocks: Iterator[Any], cut: Cut, channel: Channel) -> Iterator[list[Any]]:
    """Yield this rank's parts of a split stream; the workers end with it."""
    with closing(blocks):  # type: ignore[type-var]
        yield from rebalanced_parts(HeldItems(blocks), cut, channel)


def _collated(
    parts: Iterator[list[Any]], first_batch: int, collate_fn: Collate | ReadyBatch | WholeBatch
) -> Iterator[Any]:
    with closing(parts):  # type: ignore[type-var]
        for number, part in enumerate(parts):
            if number >= first_batch:
                yield collate_fn(part)


class _Once(IterableDataset[Any]):
    """A data set over an iterator, for one pass of a loader."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items


@dataclass(eq=False)
class ShardStream(WorkerStream):
    """A rank's shards: items in blocks, from a worker as bytes."""

    reads: ClassVar = "after {} items"

    split: Split
    block_size: int

    def __iter__(self) -> Iterator[Any]:
        epoch, _, keeps = self.place.tolist()  # now: a persistent worker's place moves on
        info = self.worker()
        reader = self.rank * self.split.readers_per_rank + (info.id if info else 0)
        stream = self._open(epoch, reader, keeps=bool(keeps), in_worker=info is not None)
        return self._blocks(stream, in_worker=info is not None)

    def _blocks(self, stream: Stream, *, in_worker: bool) -> Iterator[Any]:
        for num_read in count(step=self.block_size):
            if self.progress is not None and in_worker:
                self.progress.begin(num_read)
            with stream.reading():
                items = stream.take(self.block_size)
            if not items:
                return
            yield pack(items) if in_worker else items

    def _open(self, epoch: int, reader: int, *, keeps: bool, in_worker: bool) -> Stream:
        """Start one pass over a reader's shard."""
        data, split, info = self.data, self.split, None
        seed = mix(self.seed + reader + 1)
        if split.kind == "shard":
            data = shard_of(data, split.num_readers, reader)
        else:
            worker_seed = torch.initial_seed() if in_worker else seed
            info = WorkerInfo(
                id=reader, num_workers=split.num_readers, seed=worker_seed, dataset=data
            )
        return Stream(data, epoch, seed=seed, keeps=keeps, info=info, in_worker=in_worker)
