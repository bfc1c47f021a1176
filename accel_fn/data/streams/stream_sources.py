"""The ways of data sets that can only be iterated: taking turns on one stream, or splitting it."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
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
from accel_fn.data.locate import locate_by_counting
from accel_fn.data.order import Order, mix
from accel_fn.data.same_loader import check_same
from accel_fn.data.streams.end_of_stream import until_end
from accel_fn.data.streams.passes import Passes, options_of
from accel_fn.data.streams.read_stream import WorkerInit
from accel_fn.data.streams.rebalance import even_parts
from accel_fn.data.streams.round_robin import Cut, TurnsStream
from accel_fn.data.streams.sharing import Sharing, read_sharing
from accel_fn.data.streams.split import Shard, ShardStream, Split
from accel_fn.data.workers.lost_workers import identity
from accel_fn.errors import ArgumentError, ArgumentTypeError, check_alike, message

SPLITS = ("auto", "turns", "workers")
Collate = Callable[[list[Any]], Any]


def stream_source(
    loader: DataLoader[Any], state: DistState, *, batch: str, split: str
) -> TurnsSource | SplitSource:
    """The source of batches for a loader over an `IterableDataset`."""
    read = partial(read_sharing, loader, state, batch=batch, split=split)
    sharing = read() if state.group is None else all_or_none(read, state, "shard_loader")
    if state.group is not None:
        check_same(sharing, loader.dataset, state)
    if sharing.split is None:
        alone = state.world_size == 1 or state.group is None
        return TurnsSource(loader, sharing, state.rank, None if alone else open_channel(state))
    return SplitSource(loader, sharing, sharing.split, open_channel(state))


class _StreamSource(ABC):
    """What both ways share: positions by arithmetic where the data set has a length, else by reading."""

    def __init__(self, loader: DataLoader[Any], sharing: Sharing, rank: int) -> None:
        self._collate: Collate = loader.collate_fn
        self._cut = sharing.cut
        self._num_items = sharing.num_items
        self._seed = sharing.seed
        self._rank = rank
        self._name = type(loader.dataset).__name__

    @abstractmethod
    def _start(self, epoch: int, first_batch: int) -> Iterator[Any]:
        """Batches of an epoch from one on."""

    @abstractmethod
    def _count(self, epoch: int) -> Iterator[Any]:
        """Something for every batch of an epoch, at less cost than the batches."""

    def num_batches(self) -> int:
        """Batches of an epoch, from the length of the data set."""
        if self._num_items is None:
            repair = "count batches as they come, or give the data set one"
            raise ArgumentTypeError(
                message("len", "data set", "have a __len__", self._name, repair)
            )
        cut = self._cut
        order = Order(self._num_items, cut.batch_size, cut.world_size, False, cut.drop_last, 0)
        return order.num_batches()

    def facts(self) -> dict[str, int | None]:
        """How it is cut, and its length where it says one."""
        return {
            "num_samples": self._num_items,
            "batch_size": self._cut.batch_size,
            "drop_last": self._cut.drop_last,
            "seed": self._seed,
        }

    def batches(self, epoch: int, first_batch: int) -> Iterator[Any]:
        """From a batch of an epoch to its end; what comes before it is read and dropped."""
        return self._watched(self._start(epoch, first_batch), epoch, first_batch)

    def _watched(self, batches: Iterator[Any], epoch: int, first_batch: int) -> Iterator[Any]:
        """Errors say where they were met; a length that is wrong is warned of."""
        count = first_batch
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

    def locate(self, step: int, window: int = 1) -> tuple[int, int]:
        """By arithmetic, or by reading from the start."""
        if self._num_items is not None and self.num_batches() > 0:
            return divmod(step, -(-self.num_batches() // window))
        return locate_by_counting(step, self._count, window)

    def indices(self, epoch: int, batch: int) -> Tensor:
        """Refused: items of a stream have no numbers."""
        rule = "be over a data set that can be indexed"
        value = f"{self._name}, asked for batch {batch} of epoch {epoch}"
        raise ArgumentError(message("indices", "loader", rule, value))

    global_indices = indices


def _nothing(items: list[Any]) -> None:
    """A collate_fn for who only counts."""


class TurnsSource(_StreamSource):
    """A `Source`: every rank reads the stream and keeps its part of every global batch."""

    def __init__(
        self, loader: DataLoader[Any], sharing: Sharing, rank: int, channel: Channel | None
    ) -> None:
        super().__init__(loader, sharing, rank)
        self._channel = channel
        options = options_of(loader, WorkerInit)
        given: dict[str, Any] = {
            "data": loader.dataset,
            "cut": self._cut,
            "rank": rank,
            "seed": sharing.seed,
        }
        seed = mix(sharing.seed) + rank
        stream = partial(TurnsStream, collate_fn=self._collate, **given)
        self._passes = Passes(stream, options, seed)
        once = {**options, "persistent_workers": False}
        self._counting = Passes(partial(TurnsStream, collate_fn=_nothing, **given), once, seed)

    def _start(self, epoch: int, first_batch: int) -> Iterator[Any]:
        items = self._passes.start(epoch, first_batch)
        if self._channel is None:
            return until_end(items, None, first_batch)
        channel = self._channel.another()
        return channel.telling(until_end(items, channel, first_batch))

    def _count(self, epoch: int) -> Iterator[Any]:
        return until_end(self._counting.start(epoch, 0), None, 0)

    def locate(self, step: int, window: int = 1) -> tuple[int, int]:
        """As it is for all; where each has to read for it, they compare what they find."""
        find = partial(super().locate, step, window)
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
    """A `Source`: every rank reads its own shard, and what is left over of longer ones is shared out."""

    def __init__(
        self, loader: DataLoader[Any], sharing: Sharing, split: Split, channel: Channel
    ) -> None:
        super().__init__(loader, sharing, channel.state.rank)
        data: Any = loader.dataset
        self._channel = channel
        splits_itself = split.way == "workers"
        init = partial(
            WorkerInit,
            first=self._rank * split.readers_per_rank if splits_itself else None,
            num_workers=split.num_readers if splits_itself else 1,
        )
        options = options_of(loader, init)
        if loader.num_workers:
            options["num_workers"] = split.readers_per_rank
        self._pinning = {name: options.pop(name) for name in ("pin_memory", "pin_memory_device")}
        stream = partial(
            ShardStream,
            data=data,
            split=split,
            rank=self._rank,
            seed=sharing.seed,
            block_size=-(-self._cut.batch_size // self._cut.world_size),
        )
        self._passes = Passes(stream, options, mix(sharing.seed) + self._rank)

    def _start(self, epoch: int, first_batch: int) -> Iterator[Any]:
        channel = self._channel.another()
        batches = _collated(self._parts(channel, epoch), first_batch, self._collate)
        if not self._pinning["pin_memory"]:
            return channel.telling(batches)
        pinning: DataLoader[Any] = DataLoader(
            _Given(batches),
            batch_size=None,
            collate_fn=identity,
            generator=torch.Generator(),
            **self._pinning,
        )
        return channel.telling(iter(pinning))

    def _count(self, epoch: int) -> Iterator[Any]:
        channel = self._channel.another()
        return channel.telling(self._parts(channel, epoch))

    def _parts(self, channel: Channel, epoch: int) -> Iterator[list[Any]]:
        return _parts(self._passes.start(epoch, 0), self._cut, channel)


def _parts(blocks: Iterator[Any], cut: Cut, channel: Channel) -> Iterator[list[Any]]:
    """This rank's parts of a split source, whose workers end with it."""
    with closing(blocks):  # type: ignore[type-var]
        yield from even_parts(Shard(blocks), cut, channel)


def _collated(parts: Iterator[list[Any]], first_batch: int, collate_fn: Collate) -> Iterator[Any]:
    with closing(parts):  # type: ignore[type-var]
        for number, part in enumerate(parts):
            if number >= first_batch:
                yield collate_fn(part)


class _Given(IterableDataset[Any]):
    """An iterator, for a loader to go through once."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items
