"""Torch's DataLoader over workers that are watched: a death is told by `next`, an end is not waited for."""

from __future__ import annotations

import os
import select
import signal
import struct
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import current_process, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event
from pickle import UnpicklingError
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as _torch_worker
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from accel_fn.errors import WorkerError

_ASK_S = 0.005  # between two looks at workers that are about to end
_PATIENCE_S = 0.5  # for workers that are in the middle of reading something that nobody waits for
_LOOK_S = 0.2  # between two looks whether all workers that are waited for live
_HINTS = {
    "SIGKILL": "was there memory enough? fewer workers take less",
    "SIGBUS": "was there room in /dev/shm? fewer workers take less",
}
_BROKEN = (OSError, EOFError, RuntimeError, UnpicklingError)
"""What reading from a worker that has died may raise."""


class WatchedLoader(DataLoader[Any]):
    """Torch's, with another iterator where there are workers."""

    def __init__(
        self, data: Any, *, worker_init_fn: Callable[[int], None] | None = None, **options: Any
    ) -> None:
        super().__init__(data, worker_init_fn=_Init(worker_init_fn), **options)

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return _Running(self) if self.num_workers else super()._get_iterator()


class _Running(_MultiProcessingDataLoaderIter):
    """That a worker has died is told by its `next`, and nowhere else.

    Torch raises wherever the main thread is when it hears of that: in the middle of a step.
    """

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if first_iter:  # the workers have been started
            signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
            self._worker_pids_set = False
            self._workers_done_event.__class__ = _Ending
            queue: Any = self._worker_result_queue
            queue._recv_bytes = _Receiver(queue._reader, weakref.ref(self)).receive
        super()._reset(loader, first_iter)

    def look(self) -> None:
        """Raise if a worker has died."""
        if lost := lost_workers(self):
            raise RuntimeError(lost)

    def _try_get_data(self, timeout: float = _LOOK_S) -> tuple[bool, Any]:
        """Torch's, which itself looks every five seconds."""
        deadline = time.monotonic() + timeout
        while True:
            self.look()
            wait_s = max(0, min(deadline - time.monotonic(), _LOOK_S))
            try:
                found: tuple[bool, Any] = super()._try_get_data(wait_s)  # type: ignore[no-untyped-call]
            except RuntimeError:  # torch has seen a death first, and says less of it
                self.look()
                raise
            if found[0] or time.monotonic() >= deadline:
                return found


class _Receiver:
    """Receives what workers send. What is half sent may have no end: it looks whether they live."""

    def __init__(self, reader: Connection, running: Callable[[], _Running | None]) -> None:
        self._reader: Any = reader
        self._running = running
        self._arriving = select.poll()
        self._arriving.register(reader.fileno(), select.POLLIN)

    def receive(self) -> bytes:
        """The next message, as Python's connections read it."""
        (size,) = struct.unpack("!i", self._read(4))
        if size == -1:
            (size,) = struct.unpack("!Q", self._read(8))
        return self._read(size)

    def _read(self, size: int) -> bytes:
        found: bytes = self._reader._recv(size, self._read_some).getvalue()
        return found

    def _read_some(self, handle: int, size: int) -> bytes:
        while not self._arriving.poll(_LOOK_S * 1000):
            if (running := self._running()) is not None:
                running.look()
        return os.read(handle, size)


class _Ending(Event):
    """The event that tells workers to end. They ask whether it is set, and nobody sleeps until it is.

    Torch's is locked to set it or to ask, for ever where a worker was killed while it asked.
    """

    _is_told = False

    def set(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._flag.release()  # type: ignore[attr-defined]

    def is_set(self) -> bool:
        return self._is_told


@dataclass(frozen=True, slots=True)
class _Init:
    """Called first in a worker: lets it end with the process that it reads for."""

    fn: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        _torch_worker.ManagerWatchdog = _Watchdog  # type: ignore[assignment, misc]
        if self.fn is not None:
            self.fn(worker)


class _Watchdog:
    """Tells a worker whether the process that it reads for lives.

    Torch's asks whether its parent is still whoever that was once the worker had started: that may
    be who has adopted it, or a fork server, which lives as long as its children.
    """

    def is_alive(self) -> bool:
        reader = parent_process()
        assert reader is not None
        if isinstance(current_process(), ForkServerProcess):
            return reader.is_alive()  # of no use to forked ones, which hold it open for each other
        return os.getppid() == reader.pid


def end_workers(running: Any, *, at_once: bool = False) -> None:
    """End the workers behind a DataLoader's iterator, after what they read or without waiting for that."""
    if at_once:
        # One that dies while it looks at what is shared leaves that locked: it is asked first.
        running._workers_done_event.set()
        for queue in running._index_queues:
            queue.put(None)
        _await_ends(running._workers)
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
