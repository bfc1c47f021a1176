"""Batches by the numbers of their samples, read in this process or by a loader's workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, get_worker_info
from torch.utils.data._utils import worker as _torch_worker
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data._utils.worker import WorkerInfo

from accel_fn.core.given_batches import mark
from accel_fn.data.empty_part import EmptyPart
from accel_fn.data.indexed.fetch import Fetcher, Part, ReadyFetcher, WholeFetcher, listed
from accel_fn.data.loader import Numbered
from accel_fn.data.order import mix
from accel_fn.data.set_epoch import LoopEpochs, may_hold_samples
from accel_fn.data.workers import (
    WORKER_OPTIONS,
    IdlePools,
    WorkerPool,
    WorkerProgress,
    make_loader,
    worker_error,
)

_LOOKS = (0, 1, 9, 99)
"""The batches of a pass at which a step may look."""


class BatchReader:
    """A user's loader without its order: its data set, collate_fn, pinning and workers.

    With `collates_whole`, it is given the samples of all ranks, and takes its rows of their batch.
    """

    def __init__(
        self, loader: DataLoader[Any], rank: int, world_size: int, *, collates_whole: bool
    ) -> None:
        # All ranks collate the same batch, so its random numbers must be those of one rank.
        self._rank = 0 if collates_whole else rank
        data, collate_fn = loader.dataset, loader.collate_fn
        self._fetcher = Fetcher(data, collate_fn)
        if loader.batch_sampler is None:
            self._fetcher = ReadyFetcher(
                data, collate_fn, rank, world_size, collates_whole=collates_whole
            )
        elif collates_whole:
            self._fetcher = WholeFetcher(data, collate_fn, rank, world_size)
        self._loop_epochs = LoopEpochs(loader.dataset, may_hold_samples)
        self._pins = loader.pin_memory and _can_pin()
        kept = {name: getattr(loader, name) for name in WORKER_OPTIONS}
        self._options: dict[str, Any] = {**kept, "pin_memory": self._pins}
        self._pools = IdlePools(
            partial(_PartWorkers, self._fetcher, self._options), loader.persistent_workers
        )

    def batches(
        self,
        parts: Iterable[Any],
        *,
        epoch: int | None,
        first_batch: int,
        seed: int,
        by_loop: bool = False,
    ) -> Iterator[Any]:
        """Yield the batch of each part, in order. Workers start with the first.

        With `by_loop`, the data set stays in an epoch that the loop has set since the last pass.

        A part is [num_samples], int64, a list of keys of the data set, or empty; where the data set has
        batches ready, it may be the key of one, which all ranks read. Workers' random generators are
        seeded at each batch; with a `worker_init_fn`, at each pass only.
        """
        keeps = epoch is None or (by_loop and self._loop_epochs.are_set())
        epoch = epoch or 0
        seed = mix(mix(seed) + epoch)
        of_epoch = (
            Part(epoch, batch, numbers, keeps=keeps)
            for batch, numbers in enumerate(parts, first_batch)
        )
        looked: dict[int, Part] = {}
        noted = map(partial(_note_looked, looked, first_batch), of_epoch)
        return self._marked(self._read(noted, epoch, first_batch, seed), looked, first_batch)

    def _read(
        self, of_epoch: Iterator[Part], epoch: int, first_batch: int, seed: int
    ) -> Iterator[Any]:
        if self._options["num_workers"]:
            # A worker_init_fn may have seeded them itself.
            if self._options["worker_init_fn"] is None:
                # All ranks read a whole ready batch, so its random numbers must be those of one rank.
                seeds = [mix(mix(seed + rank)) for rank in (0, self._rank)]
                of_epoch = (
                    replace(part, seed=mix(seeds[part.is_split] + part.batch)) for part in of_epoch
                )
            return self._by_workers(of_epoch, epoch, first_batch, mix(seed + self._rank))
        return self._here(of_epoch, epoch, first_batch)

    def _marked(
        self, batches: Iterator[Any], looked: dict[int, Part], first_batch: int
    ) -> Iterator[Any]:
        """Mark the batches that a step looks at with their samples."""
        for number, batch in enumerate(batches, first_batch):
            part = looked.pop(number, None)
            origin = None if part is None else self._fetcher.origin(part)
            if origin is not None:
                mark(batch, origin)
            yield batch

    def numbered(self, parts: Iterable[Any], **settings: Any) -> Iterator[Numbered[Any]]:
        """Yield the same batches, each after the samples in it; None for the key of a ready one."""
        # A queue, since workers take parts long before their batches come.
        taken: deque[Any] = deque()

        def recorded() -> Iterator[Any]:
            for part in parts:
                taken.append(part)
                yield part

        for batch in self.batches(recorded(), **settings):
            numbers = taken.popleft()
            if isinstance(numbers, Tensor):
                numbers = numbers.tolist()
            if isinstance(numbers, EmptyPart):
                numbers = []
            yield self._fetcher.own([*numbers]) if isinstance(numbers, list) else None, batch

    def _here(self, parts: Iterable[Any], epoch: int, first_batch: int) -> Iterator[Any]:
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
        self, parts: Iterable[Any], epoch: int, first_batch: int, seed: int
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


def _note_looked(looked: dict[int, Part], first_batch: int, part: Part) -> Part:
    """Keep the parts of the batches that a step looks at."""
    if part.batch - first_batch in _LOOKS:
        looked[part.batch] = part
    return part


def _where(batch: int, epoch: int) -> str:
    return f"batch {batch} of epoch {epoch}"


def _can_pin() -> bool:
    """Is there an accelerator with pinned memory? Without one, torch does not pin either."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type != "mps"


class _PartWorkers(WorkerPool):
    """Worker processes that read the batch of each part."""

    def __init__(self, fetcher: Fetcher, options: dict[str, Any]) -> None:
        progress = WorkerProgress(options["num_workers"])
        self._parts = _PartSampler(progress)
        self._generator = torch.Generator()
        loader = make_loader(
            fetcher.recording(progress),
            sampler=self._parts,
            generator=self._generator,
            **{**options, "worker_init_fn": _InitWithUsersDataSet(options["worker_init_fn"])},
        )
        super().__init__(loader, self._parts.where)

    def read(self, parts: Iterable[Part], seed: int) -> Iterator[Any]:
        """Yield the batch of each part, in order; workers take parts ahead of time."""
        self._parts.start(parts)
        self._generator.manual_seed(seed)
        self.start()
        for batch in self.items():
            self._parts.forget_oldest()
            yield batch

    def drop_rest(self) -> None:
        # without parts, workers read nothing more; what they have read, torch drops at the next pass
        self._parts.start(())


class _PartSampler(Sampler[Any]):
    """Gives the loader the parts of the current pass, once."""

    def __init__(self, progress: WorkerProgress) -> None:
        self._progress = progress
        self.pending: dict[int | None, Part] = {}
        """Parts that were taken and not read yet, oldest first."""
        self.start(())

    def start(self, parts: Iterable[Part]) -> None:
        self._parts = iter(parts)
        self.pending.clear()

    def forget_oldest(self) -> None:
        del self.pending[next(iter(self.pending))]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        part = next(self._parts).listed()
        self.pending[part.batch] = part
        return part

    def where(self, worker: int) -> str:
        """Describe what a worker is reading; empty if unknown."""
        number, place = self._progress.of(worker) or (None, -1)
        part = self.pending.get(number)
        if part is None:
            return ""
        numbers: Any = part.numbers
        samples = f"sample {numbers[place]}" if place >= 0 else f"samples {listed(numbers)}"
        return f" in {samples} of batch {number} of epoch {part.epoch}"


@dataclass(frozen=True, slots=True)
class _InitWithUsersDataSet:
    """Makes `get_worker_info` show the user's data set, then calls the user's worker_init_fn."""

    fn: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        data: Any = info.dataset
        # `get_worker_info` reads a private global of torch; there is no public way to set it.
        _torch_worker._worker_info = WorkerInfo(
            id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=data.dataset
        )
        if self.fn is not None:
            self.fn(worker)
