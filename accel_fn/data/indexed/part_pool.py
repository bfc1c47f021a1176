"""Workers that read the batches of map-style data ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler, get_worker_info
from torch.utils.data._utils import worker as _torch_worker
from torch.utils.data._utils.worker import WorkerInfo

from accel_fn.data.indexed.fetch import Fetcher, Part, listed
from accel_fn.data.workers.lost_workers import make_loader
from accel_fn.data.workers.pool import WorkerPool
from accel_fn.data.workers.progress import Progress


class PartPool(WorkerPool):
    """Workers that read the batch of each part."""

    def __init__(self, fetcher: Fetcher, options: dict[str, Any]) -> None:
        progress = Progress(options["num_workers"])
        self._parts = _PartSampler(progress)
        self._generator = torch.Generator()
        loader = make_loader(
            fetcher.noting(progress),
            sampler=self._parts,
            generator=self._generator,
            **{**options, "worker_init_fn": _WorkerInit(options["worker_init_fn"])},
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
        self._parts.start(())


class _PartSampler(Sampler[Any]):
    """Gives the loader the parts of the current pass, once."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        # parts that were taken and not read yet, oldest first
        self.pending: dict[int | None, Part] = {}
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
        return f" in {samples} of batch {number} of epoch {part.epoch or 0}"


@dataclass(frozen=True, slots=True)
class _WorkerInit:
    """Makes `get_worker_info` show the user's data set, then calls the user's worker_init_fn.

    Which worker a data set takes itself for is a private global of torch.
    """

    fn: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        data: Any = info.dataset
        _torch_worker._worker_info = WorkerInfo(
            id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=data.dataset
        )
        if self.fn is not None:
            self.fn(worker)
