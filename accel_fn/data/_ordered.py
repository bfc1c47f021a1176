"""The way of data sets that can be indexed: batches by a pure order, nothing to talk about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from accel_fn.data._order import Order

_SAMPLES_AT_ONCE = 4096
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


class OrderedSource:
    """A `Source`: this rank's part of every batch of a pure `Order`."""

    def __init__(self, loader: DataLoader[Any], order: Order, rank: int) -> None:
        self.order = order
        self.rank = rank
        self._cursor = _Cursor(order, rank)
        kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset, batch_sampler=self._cursor, **kept
        )

    def num_batches(self) -> int:
        """Batches of an epoch."""
        return self.order.num_batches()

    def batches(self, epoch: int, first_batch: int) -> Iterator[Any]:
        """From batch `first_batch` of an epoch to its end."""
        self._cursor.epoch, self._cursor.first_batch = epoch, first_batch
        return iter(self._loader)

    def locate(self, step: int) -> tuple[int, int]:
        """By arithmetic."""
        return divmod(step, self.num_batches())

    def indices(self, epoch: int, batch: int) -> Tensor:
        """Of this rank."""
        return self.order.indices(epoch, batch, self.rank)

    def global_indices(self, epoch: int, batch: int) -> Tensor:
        """Of all ranks."""
        return self.order.global_indices(epoch, batch)


class _Cursor(Sampler[list[int]]):
    """The batch sampler inside: set to an epoch just before each pass, which takes the values with it."""

    def __init__(self, order: Order, rank: int) -> None:
        self.order = order
        self.rank = rank
        self.epoch = 0
        self.first_batch = 0

    def __len__(self) -> int:
        return self.order.num_batches()

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches(self.epoch, self.first_batch)

    def _batches(self, epoch: int, first_batch: int) -> Iterator[list[int]]:
        """Batch by batch; the order of many is computed at once, which costs little more than of one."""
        at_once = max(1, _SAMPLES_AT_ONCE // self.order.batch_size)
        for first in range(first_batch, len(self), at_once):
            batches = range(first, min(first + at_once, len(self)))
            parts = [torch.arange(*self.order.part(batch, self.rank)) for batch in batches]
            sizes = [len(part) for part in parts]
            samples = self.order.samples(epoch, torch.cat(parts))
            yield from (part.tolist() for part in torch.split(samples, sizes))
