"""Batches by the numbers of their samples, read in this process or by a loader's workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from accel_fn.data.indexed.fetch import Fetcher, Part, ReadyFetcher
from accel_fn.data.indexed.part_pool import PartPool
from accel_fn.data.loader import Numbered
from accel_fn.data.order import mix
from accel_fn.data.workers.lost_workers import worker_error
from accel_fn.data.workers.pool import IdlePools

_KEPT = (
    "num_workers",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


class Loading:
    """A user's loader without its order: its data set, collate_fn, pinning and workers."""

    def __init__(self, loader: DataLoader[Any], rank: int, world_size: int) -> None:
        self._rank = rank
        self._fetcher = Fetcher(loader.dataset, loader.collate_fn)
        if loader.batch_sampler is None:
            self._fetcher = ReadyFetcher(loader.dataset, loader.collate_fn, rank, world_size)
        self._pins = loader.pin_memory and _can_pin()
        kept = {name: getattr(loader, name) for name in _KEPT}
        self._options: dict[str, Any] = {**kept, "pin_memory": self._pins}
        self._pools = IdlePools(
            partial(PartPool, self._fetcher, self._options), loader.persistent_workers
        )

    def batches(
        self, parts: Iterable[Any], *, epoch: int | None, first_batch: int, seed: int
    ) -> Iterator[Any]:
        """Yield the batch of each part, in order. Workers start with the first.

        A part is [num_samples], int64, or a list of whatever the data set is indexed by; of ready
        batches also the key of one, which all ranks read. Workers' random numbers are seeded at each
        batch; with a `worker_init_fn`, at each pass alone.
        """
        seed = mix(mix(seed) + (epoch or 0))
        of_epoch = (Part(epoch, batch, numbers) for batch, numbers in enumerate(parts, first_batch))
        if self._options["num_workers"]:
            if self._options["worker_init_fn"] is None:  # a worker_init_fn may have seeded them
                seeds = [mix(mix(seed + rank)) for rank in (0, self._rank)]
                of_epoch = (
                    replace(part, seed=mix(seeds[part.is_split] + part.batch)) for part in of_epoch
                )
            return self._by_workers(of_epoch, epoch, first_batch, mix(seed + self._rank))
        return self._here(of_epoch, epoch, first_batch)

    def numbered(self, parts: Iterable[Any], **settings: Any) -> Iterator[Numbered[Any]]:
        """Yield the same batches, each after the samples in it; None for the key of a ready one."""
        ahead: deque[Any] = deque()  # workers take parts long before their batches come

        def noted() -> Iterator[Any]:
            for part in parts:
                ahead.append(part)
                yield part

        for batch in self.batches(noted(), **settings):
            numbers = ahead.popleft()
            if isinstance(numbers, Tensor):
                numbers = numbers.tolist()
            yield [*numbers] if isinstance(numbers, list) else None, batch

    def _here(self, parts: Iterable[Any], epoch: int | None, first_batch: int) -> Iterator[Any]:
        batch = first_batch
        fetch, pins = self._fetcher.of_pass().__getitem__, self._pins
        try:
            for part in parts:
                found = fetch(part)
                yield pin_memory(found) if pins else found  # type: ignore[no-untyped-call]
                batch += 1
        except Exception as error:
            error.add_note(f"shard_loader: {_where(batch, epoch)}")
            raise

    def _by_workers(
        self, parts: Iterable[Any], epoch: int | None, first_batch: int, seed: int
    ) -> Iterator[Any]:
        batch, failed = first_batch, False
        pool = self._pools.take()
        try:
            for found in pool.read(parts, seed):
                yield found
                batch += 1
        except Exception as error:
            failed = True
            if lost := pool.lost(after=error):
                where = f" while {_where(batch, epoch)} was waited for"
                raise worker_error(lost, where) from error
            error.add_note(f"shard_loader: {_where(batch, epoch)}")
            raise
        finally:
            self._pools.give_back(pool, failed=failed)


def _where(batch: int, epoch: int | None) -> str:
    return f"batch {batch} of epoch {epoch or 0}"


def _can_pin() -> bool:
    """Is there an accelerator with pinned memory? Without one, torch does not pin either."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type != "mps"
