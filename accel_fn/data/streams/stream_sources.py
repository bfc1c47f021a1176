"""Batch sources for data sets that can only be iterated: round robin over one stream, or split."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from accel_fn.base.state import DistState
from accel_fn.comm.channel import Channel, open_channel
from accel_fn.comm.collectives import all_or_none
from accel_fn.comm.primitives import exchange
from accel_fn.data.collate import Collate, ReadyBatch
from accel_fn.data.loader import Numbered, unnumbered
from accel_fn.data.order import Cut, find_by_counting, mix
from accel_fn.data.same_loader import check_same
from accel_fn.data.streams.passes import Passes, options_of
from accel_fn.data.streams.read_stream import WorkerInit
from accel_fn.data.streams.rebalance import rebalanced_parts
from accel_fn.data.streams.round_robin import RoundRobinStream, until_end
from accel_fn.data.streams.split import HeldItems, ShardStream, Split
from accel_fn.data.streams.stream_options import StreamOptions, read_stream_options
from accel_fn.data.workers import identity
from accel_fn.errors import ArgumentError, ArgumentTypeError, check_alike, message

SPLITS = ("auto", "round_robin", "workers")


def stream_source(
    loader: DataLoader[Any], state: DistState, *, batch: str, split: str
) -> RoundRobinSource | SplitSource:
    """Make the source of batches for a loader over an `IterableDataset`."""
    read = partial(read_stream_options, loader, state, batch=batch, split=split)
    options = read() if state.group is None else all_or_none(read, state, "shard_loader")
    if state.group is not None:
        check_same(options, loader.dataset, state)
    if options.split is None:
        is_alone = state.world_size == 1 or state.group is None
        channel = None if is_alone else open_channel(state)
        return RoundRobinSource(loader, options, state.rank, channel)
    return SplitSource(loader, options, options.split, open_channel(state))


class _StreamSource:
    """A `Source` whose positions are computed if the data set has a length, else found by reading."""

    def __init__(self, loader: DataLoader[Any], options: StreamOptions, rank: int) -> None:
        self._collate: Collate | ReadyBatch = Collate(loader.collate_fn)
        if loader.batch_size is None:
            self._collate = ReadyBatch(loader.collate_fn, rank, options.world_size)
        self._cut = options.cut
        self._num_items = options.num_items
        self._seed = options.seed
        self._rank = rank
        self._name = type(loader.dataset).__name__

    _start: Callable[[int, int], Iterator[Any]]  # batches of an epoch from one on
    _count: Callable[[int], Iterator[Any]]  # something for every batch, at less cost

    def num_batches(self) -> int:
        if self._num_items is None:
            repair = "count batches as they come, or give the data set one"
            raise ArgumentTypeError(
                message("len", "data set", "have a __len__", self._name, repair)
            )
        return self._cut.count(self._num_items)

    def facts(self) -> dict[str, int | None]:
        return {
            "num_samples": self._num_items,
            "batch_size": self._cut.batch_size,
            "drop_last": self._cut.drop_last,
            "seed": self._seed,
        }

    def batches(self, epoch: int | None, first_batch: int) -> Iterator[Any]:
        """Yield an epoch's batches from one on; those before it are read and dropped.

        Errors get a note with their batch. A length that is wrong gives a warning.
        """
        epoch = epoch or 0
        return self._checked(self._start(epoch, first_batch), epoch, first_batch)

    def numbered(self, epoch: int | None, first_batch: int) -> Iterator[Numbered[Any]]:
        return unnumbered(self.batches(epoch, first_batch))

    def _checked(self, batches: Iterator[Any], epoch: int, count: int) -> Iterator[Any]:
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                break
            except Exception as error:
                where = f"batch {count} of epoch {epoch} on rank {self._rank}"
                error.add_note(f"shard_loader: while waiting for {where}")
                raise
            yield batch
            count += 1
        if self._num_items is not None and count != self.num_batches():
            warnings.warn(
                f"shard_loader: {self._name} has the length {self._num_items}, {self.num_batches()} batches, "
                f"but epoch {epoch} ended at batch {count}; a run that is resumed counts on the length",
                stacklevel=2,
            )

    def position(self, step: int, window: int = 1) -> tuple[int, int]:
        """Compute the position, or find it by reading from the start."""
        if self._num_items is not None and self.num_batches() > 0:
            return divmod(step, -(-self.num_batches() // window))
        return find_by_counting(step, self._count, window)

    def indices(self, epoch: int, batch: int) -> Tensor:
        """Refuse the call, since items of a stream have no numbers."""
        rule = "be over a data set that can be indexed"
        value = f"{self._name} for batch {batch} of epoch {epoch}"
        raise ArgumentError(message("indices", "loader", rule, value))

    global_indices = indices


def _nothing(items: list[Any]) -> None:
    """Collate to nothing, to count batches only."""


class RoundRobinSource(_StreamSource):
    """A `Source`: every rank reads the stream and keeps its part of every global batch."""

    def __init__(
        self, loader: DataLoader[Any], options: StreamOptions, rank: int, channel: Channel | None
    ) -> None:
        super().__init__(loader, options, rank)
        self._channel = channel
        seed = options.seed
        place = (
            rank if self._cut.world_size > 1 else 0
        )  # ready batches are read whole by every rank
        stream_of = partial(
            RoundRobinStream, data=loader.dataset, cut=self._cut, rank=place, seed=seed
        )
        kept, worker_seed = options_of(loader, WorkerInit), mix(seed) + rank
        collated = partial(stream_of, collate_fn=self._collate)
        self._passes = Passes(collated, kept, worker_seed)
        once = {**kept, "persistent_workers": False}
        self._counting = Passes(partial(stream_of, collate_fn=_nothing), once, worker_seed)

    def _start(self, epoch: int, first_batch: int) -> Iterator[Any]:
        items = self._passes.start(epoch, first_batch)
        if self._channel is None:
            return until_end(items, None, first_batch)
        channel = self._channel.another()
        return channel.sending_errors(until_end(items, channel, first_batch))

    def _count(self, epoch: int) -> Iterator[Any]:
        return until_end(self._counting.start(epoch, 0), None, 0)

    def position(self, step: int, window: int = 1) -> tuple[int, int]:
        """Find the position; ranks that read for it compare what they find."""
        find = partial(super().position, step, window)
        if self._channel is None or self._num_items is not None:
            return find()
        state = self._channel.state
        place = all_or_none(find, state, "epochs")
        check_alike(
            [
                f"epoch {epoch} and batch {batch}"
                for epoch, batch in exchange(place, state, "epochs")
            ],
            f"epochs: loader must be over the same stream on every rank, with one place after {step} steps",
            "give every rank the whole stream",
        )
        return place


class SplitSource(_StreamSource):
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

    def _start(self, epoch: int, first_batch: int) -> Iterator[Any]:
        channel = self._channel.another()
        batches = _collated(self._parts(channel, epoch), first_batch, self._collate)
        if not self._pinning["pin_memory"]:
            return channel.sending_errors(batches)
        pinning: DataLoader[Any] = DataLoader(
            _Once(batches),
            batch_size=None,
            collate_fn=identity,
            generator=torch.Generator(),
            **self._pinning,
        )
        return channel.sending_errors(iter(pinning))

    def _count(self, epoch: int) -> Iterator[Any]:
        channel = self._channel.another()
        return channel.sending_errors(self._parts(channel, epoch))

    def _parts(self, channel: Channel, epoch: int) -> Iterator[list[Any]]:
        return _parts(self._passes.start(epoch, 0), self._cut, channel)


def _parts(blocks: Iterator[Any], cut: Cut, channel: Channel) -> Iterator[list[Any]]:
    """Yield this rank's parts of a split stream; the workers end with it."""
    with closing(blocks):  # type: ignore[type-var]
        yield from rebalanced_parts(HeldItems(blocks), cut, channel)


def _collated(
    parts: Iterator[list[Any]], first_batch: int, collate_fn: Collate | ReadyBatch
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
