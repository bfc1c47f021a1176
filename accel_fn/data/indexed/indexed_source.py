"""Batches of a data set that can be indexed, by a pure order: ranks exchange nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accel_fn.data.empty_part import EmptyPart
from accel_fn.data.indexed.load_batches import BatchReader
from accel_fn.data.loader import Numbered
from accel_fn.data.order import ItemOrder, Order, WholeOrder, no_numbers
from accel_fn.errors import ArgumentError, message

_SAMPLES_AT_ONCE = 4096  # the order of so many samples costs little more than that of one batch


class IndexedSource:
    """A `Source`: this rank's part of every batch of a pure `Order`."""

    def __init__(self, loader: DataLoader[Any], order: Order, rank: int, world_size: int) -> None:
        self.order = order
        self._is_of_items = isinstance(order, ItemOrder)
        # Every rank reads a whole item and cuts it, so the order of items has one rank.
        self.rank = 0 if self._is_of_items else rank
        is_whole = isinstance(order, WholeOrder)
        self._read_order = replace(order, world_size=1) if is_whole else order
        self._read_rank = 0 if is_whole else self.rank
        self._reader = BatchReader(loader, rank, world_size, collates_whole=is_whole)
        self.num_batches = order.num_batches
        self.facts = order.facts

    def batches(
        self, epoch: int | None, first_batch: int, *, by_loop: bool = False
    ) -> Iterator[Any]:
        return self._read(partial(self._reader.batches, by_loop=by_loop), epoch, first_batch)

    def numbered(self, epoch: int | None, first_batch: int) -> Iterator[Numbered[Any]]:
        return self._read(self._reader.numbered, epoch, first_batch)

    def _read(
        self, load: Callable[..., Iterator[Any]], epoch: int | None, first_batch: int
    ) -> Iterator[Any]:
        parts: Iterator[Any] = parts_of(self._read_order, self._read_rank, epoch or 0, first_batch)
        if self._is_of_items:
            parts = map(int, parts)
        return load(parts, epoch=epoch, first_batch=first_batch, seed=self.order.seed)

    def num_samples(self, epoch: int, batch: int) -> int | None:
        start, stop = self.order.part(batch, self.rank)
        return None if self._is_of_items else stop - start

    def position(self, step: int, window: int = 1) -> tuple[int, int]:
        return divmod(step, -(-self.num_batches() // window))

    def indices(self, epoch: int, batch: int) -> Tensor:
        return self.order.indices(epoch, self._checked(batch), self.rank)

    def global_indices(self, epoch: int, batch: int) -> Tensor:
        return self.order.global_indices(epoch, self._checked(batch))

    def _checked(self, batch: int) -> int:
        if self._is_of_items:
            raise no_numbers()
        last = self.num_batches() - 1
        if batch > last:
            raise ArgumentError(message("indices", "batch", f"be in 0 .. {last}", batch))
        return batch


def parts_of(order: Order, rank: int, epoch: int, first_batch: int) -> Iterator[Tensor | EmptyPart]:
    """Yield a rank's samples, batch by batch; many batches are computed at once."""
    # The last batch may have another size, so it is computed alone.
    last = order.num_batches() - 1
    start, stop = order.part(0, rank) if last > 0 else (0, 0)
    at_once = max(1, _SAMPLES_AT_ONCE // max(1, stop - start))
    for first in range(first_batch, last, at_once):
        several = range(first, min(first + at_once, last))
        if start == stop:
            yield from [_empty(order, epoch, batch) for batch in several]
            continue
        batches = torch.arange(several.start, several.stop).unsqueeze(1)
        places = batches * order.batch_size + torch.arange(start, stop)
        yield from order.samples(epoch, places.flatten()).view(places.shape).unbind()
    if first_batch <= last:
        part = order.indices(epoch, last, rank)
        yield part if len(part) else _empty(order, epoch, last)


def _empty(order: Order, epoch: int, batch: int) -> EmptyPart:
    return EmptyPart(order.global_indices(epoch, batch)[:1].tolist())
