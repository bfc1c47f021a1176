"""Worker processes that read batches ahead of time: torch's, for one pass at a time."""

from __future__ import annotations

import os
import select
import signal
import struct
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pickle import UnpicklingError
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as _torch_worker
from torch.utils.data._utils.worker import WorkerInfo

from accel_fn._errors import WorkerError
from accel_fn.data._fetching import Fetcher, Part, listed
from accel_fn.data._progress import Progress

_ASK_S = 0.005  # between two looks at workers that are about to end
_PATIENCE_S = 0.5  # for workers that are in the middle of reading something that nobody waits for
_LOOK_S = 0.2  # between two looks whether all workers that are waited for live
_HINTS = {
    "SIGKILL": "was there memory enough? fewer workers take less",
    "SIGBUS": "was there room in /dev/shm? fewer workers take less",
}
_BROKEN = (OSError, EOFError, RuntimeError, UnpicklingError)
"""What reading from a worker that has died may raise."""


class Crew:
    """The workers of one DataLoader, and what they are to read."""

    def __init__(self, fetcher: Fetcher, options: dict[str, Any]) -> None:
        self._feed = _Feed()
        self._progress = Progress(options["num_workers"])
        self._generator = torch.Generator()
        init = _WorkerInit(options["worker_init_fn"])
        self._loader: DataLoader[Any] = DataLoader(
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
        self._running = start_workers(self._loader)
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


def start_workers(loader: DataLoader[Any]) -> Any:
    """A DataLoader's iterator. That a worker has died is told by its `next`, and nowhere else.

    Torch raises wherever the main thread is when it hears of that: in the middle of a step.
    """
    running: Any = iter(loader)
    if getattr(running, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(running))  # type: ignore[attr-defined]
        running._worker_pids_set = False
        watch = _Watch(weakref.ref(running))
        running._try_get_data = watch.try_get_data
        running._worker_result_queue._recv_bytes = watch.receive
    return running


class _Watch:
    """Looks whether the workers live while somebody waits for what they read."""

    def __init__(self, running_of: Callable[[], Any]) -> None:
        self._running_of = running_of
        self._reader = running_of()._worker_result_queue._reader
        self._arriving = select.poll()
        self._arriving.register(self._reader.fileno(), select.POLLIN)

    def look(self) -> None:
        """Raise if one has died."""
        if lost := lost_workers(self._running_of()):
            raise RuntimeError(lost)

    def try_get_data(self, timeout: float = _LOOK_S) -> tuple[bool, Any]:
        """Torch's, which itself looks every five seconds."""
        running = self._running_of()
        deadline = time.monotonic() + timeout
        while True:
            self.look()
            wait_s = max(0, min(deadline - time.monotonic(), _LOOK_S))
            try:
                found: tuple[bool, Any] = type(running)._try_get_data(running, wait_s)
            except RuntimeError:  # torch has seen a death first, and says less of it
                self.look()
                raise
            if found[0] or time.monotonic() >= deadline:
                return found

    def receive(self) -> bytes:
        """The next message in the pipe, as Python's connections do; one that is half sent may have no end."""
        (size,) = struct.unpack("!i", self._read(4))
        if size == -1:
            (size,) = struct.unpack("!Q", self._read(8))
        return self._read(size)

    def _read(self, size: int) -> bytes:
        found: bytes = self._reader._recv(size, self._read_some).getvalue()
        return found

    def _read_some(self, handle: int, size: int) -> bytes:
        while not self._arriving.poll(_LOOK_S * 1000):
            self.look()
        return os.read(handle, size)


def end_workers(running: Any, *, at_once: bool = False) -> None:
    """End the workers behind a DataLoader's iterator, after what they read or without waiting for that."""
    if at_once:
        # One that dies while it looks at what is shared leaves that locked: it is asked first.
        running._workers_done_event.set()
        for queue in running._index_queues:
            queue.put(None)
        _await_ends(running._workers)
        if running._worker_pids_set:  # else torch says of them that they were killed
            signal_handling._remove_worker_pids(id(running))  # type: ignore[attr-defined]
            running._worker_pids_set = False
        for worker in running._workers:
            worker.terminate()  # nothing happens to one that has ended
        _await_ends(running._workers)
    running._shutdown_workers()


def _await_ends(workers: list[Any]) -> None:
    """Wait a little for their ends, by asking: what tells of an end may be held by another rank's workers."""
    deadline = time.monotonic() + _PATIENCE_S
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        time.sleep(_ASK_S)


def lost_workers(
    running: Any, where: Callable[[int], str] = lambda _: "", *, after: Exception | None = None
) -> str:
    """Which workers behind a DataLoader's iterator have died, and of what; empty where all are well.

    Args:
        running: the iterator.
        where: in words, what a worker was reading.
        after: an error that a death may explain. A connection that breaks may be
            known before the death of its worker: that is waited for a little.

    Returns:
        In words, `worker 1 (process 31) killed by SIGKILL`, and where.
    """
    workers = getattr(running, "_workers", [])
    if isinstance(after, _BROKEN):
        ended = wait([worker.sentinel for worker in workers], _PATIENCE_S)
        for worker in workers:
            if worker.sentinel in ended:
                worker.join(_PATIENCE_S)
    going_on = not getattr(running, "_shutdown", True)
    may_end = isinstance(getattr(running, "_dataset", None), IterableDataset)
    return ", ".join(
        f"worker {number} (process {worker.pid}) {_ending(worker.exitcode)}{where(number)}"
        for number, worker in enumerate(workers)
        if going_on and not worker.is_alive() and not (may_end and worker.exitcode == 0)
    )


def death(lost: str, meanwhile: str = "") -> WorkerError:
    """The error that says it: `lost` as `lost_workers` gives it, and in words what was waited for."""
    hint = next((hint for name, hint in _HINTS.items() if name in lost), None)
    return WorkerError(
        f"shard_loader: workers must live until the loop ends, got {lost}{meanwhile}; "
        f"{hint or 'num_workers=0 shows where it happens'}"
    )


def _ending(exit_code: int | None) -> str:
    """What became of a process."""
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"killed by {signal.Signals(-exit_code).name}"


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
