"""Worker processes that read batches ahead of time: torch's, for one pass at a time."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler, get_worker_info
from torch.utils.data._utils import worker as _torch_worker
from torch.utils.data._utils.worker import WorkerInfo

from accel_fn.data.indexed.fetch import Fetcher, Part, listed
from accel_fn.data.workers.progress import Progress
from accel_fn.data.workers.watched_loader import WatchedLoader, end_workers, lost_workers


class Crew:
    """The workers of one DataLoader, and what they are to read."""

    def __init__(self, fetcher: Fetcher, options: dict[str, Any]) -> None:
        self._feed = _Feed()
        self._progress = Progress(options["num_workers"])
        self._generator = torch.Generator()
        init = _WorkerInit(options["worker_init_fn"])
        self._loader = WatchedLoader(
            Fetcher(fetcher.dataset, fetcher.collate_fn, self._progress),
            batch_size=None,
            sampler=self._feed,
            collate_fn=_as_it_is,
            generator=self._generator,
            **{**options, "worker_init_fn": init},
        )
        self._running: Any = None

    def work(self, parts: Iterable[Any], seed: int) -> Iterator[Any]:
        """What the fetcher gives for each part, in order. Ends what was begun before.

        Args:
            parts: taken ahead of time, as far as the workers may be ahead.
            seed: of the workers' random numbers, where they start here.
        """
        self._feed.start(parts)
        self._generator.manual_seed(seed)
        self._running = iter(self._loader)
        while True:
            try:
                found = next(self._running)
            except StopIteration as end:
                if end.args:  # not the end: a worker's error, as torch raises it again
                    raise RuntimeError(*end.args) from end
                return
            except Exception as error:  # torch's frames hold it, and it them, and they the workers
                traceback.clear_frames(error.__traceback__)
                raise
            self._feed.forget_oldest()
            yield found

    def rest(self) -> None:
        """Let go of what is left to read; the workers stay for the next pass."""
        self._feed.start(())

    def dismiss(self, *, at_once: bool = False) -> None:
        """End the workers, not left to Python: an error that somebody keeps would keep them."""
        self.rest()
        if self._running is not None:
            # one that died holding a queue's lock lets no other end by itself
            end_workers(self._running, at_once=at_once or bool(self.lost()))
            self._running = None

    def lost(self, *, after: Exception | None = None) -> str:
        """Which workers have died, of what and where; empty where all are well. As `lost_workers`."""
        return lost_workers(self._running, self._where, after=after)

    def _where(self, worker: int) -> str:
        """What a worker was reading."""
        number, place = self._progress.of(worker) or (None, -1)
        part = self._feed.given.get(number)
        if part is None:
            return ""
        numbers: Any = part.numbers
        samples = f"sample {numbers[place]}" if place >= 0 else f"samples {listed(numbers)}"
        return f" in {samples} of batch {number} of epoch {part.epoch}"


class _Feed(Sampler[Any]):
    """The sampler inside: whatever it was given last, which is taken once."""

    def __init__(self) -> None:
        self.given: dict[
            int | None, Part
        ] = {}  # what was taken and has not come back, oldest first
        self.start(())

    def start(self, parts: Iterable[Part]) -> None:
        """Give these from here on."""
        self._parts = iter(parts)
        self.given.clear()

    def forget_oldest(self) -> None:
        """It has come back."""
        del self.given[next(iter(self.given))]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        part = next(self._parts).listed()
        self.given[part.batch] = part
        return part


def _as_it_is(batch: Any) -> Any:
    """Items are batches already."""
    return batch


@dataclass(frozen=True, slots=True)
class _WorkerInit:
    """Lets a worker look like one over the user's data set, then calls the user's worker_init_fn.

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
