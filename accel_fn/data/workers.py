"""Worker processes of loaders: pools of them, their progress, and errors if a worker dies.

When a worker dies, torch raises at the current line of the main thread, even in the middle of a
step, and names no sample. Every check here guards against a fault that a test shows:
tests/data/test_workers.py (errors in the middle of a step, a message that a worker sent in part),
tests/data/test_workers_end.py (workers that outlive a killed process) and
tests/data/test_stopped_workers.py (workers that are stopped, or killed while they hold a lock).
"""

from __future__ import annotations

import os
import select
import signal
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, partialmethod
from multiprocessing import current_process, parent_process
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.queues import Queue
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as _torch_worker

from accel_fn.core.warn import warn_user
from accel_fn.errors import WorkerError

WORKER_OPTIONS = (
    "num_workers",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)
"""Options of a user's DataLoader that a loader over our own data set takes over."""

# A dying worker's connection may break before its process has ended, so wait this long for its exit
# code.
_PATIENCE_S = 0.5
_POLL_MS = 200
_REPORT_AFTER_S, _MOST_SHOWN = 60.0, 8
_SHARED = "/dev/shm"  # noqa: S108
_HINTS = {
    "SIGKILL": "was there memory enough? fewer workers take less",
    "SIGBUS": "was there room in /dev/shm? fewer workers take less",
}
_BROKEN = (OSError, EOFError, RuntimeError, UnpicklingError)
"""Errors that reading from a dead worker may raise."""


def make_loader(
    data: Any, *, worker_init_fn: Callable[[int], None] | None = None, **options: Any
) -> DataLoader[Any]:
    """Make a DataLoader for `start_workers`; the loader returns the items of `data` unchanged."""
    init = _InitWithWatchdog(worker_init_fn)
    return DataLoader(data, batch_size=None, collate_fn=identity, worker_init_fn=init, **options)


def identity(batch: Any) -> Any:
    """Return the batch unchanged: a collate_fn for items that are batches already."""
    return batch


def start_workers(loader: DataLoader[Any], where: Callable[[int], str] = lambda _: "") -> Any:
    """Return the loader's iterator; if a worker dies later, only `next` on the iterator raises.

    A long `next` warns, and lists the workers that it waits for. `where` describes what a worker is
    reading.
    """
    try:
        running: Any = iter(loader)
    except RuntimeError as error:
        # A worker died while torch started the others, and torch has noticed it.
        if "DataLoader worker (pid" in str(error):
            raise worker_error(str(error).strip()) from error
        raise
    if getattr(running, "_worker_pids_set", False):
        # Hide the workers' ids from torch's handler of SIGCHLD, which would otherwise raise in the
        # middle of a step.
        signal_handling._remove_worker_pids(id(running))  # type: ignore[attr-defined]
        running._worker_pids_set = False
        wait = _Wait(running._workers, where)
        _end_partial_messages(running, wait)
        _report_waits(running, wait)
        _end_by_kill(running._workers)
        weakref.finalize(running, _kill_stopped, running._workers)
    return running


@dataclass(slots=True)
class _Wait:
    """Checks workers during a wait: raises if one died, and warns if one is stopped or the wait is long."""

    workers: Sequence[Any]
    where: Callable[[int], str]
    since: float | None = None
    """The time at which the wait began; None between waits."""
    is_reported: bool = False

    def end(self) -> None:
        self.since, self.is_reported = None, False

    def check(self) -> None:
        now = time.monotonic()
        if self.since is None:
            self.since = now
        # Check all workers: torch checks only those from which it still expects a batch.
        if dead := [each for each in self.workers if each.exitcode]:
            raise EOFError(f"DataLoader worker (pid {dead[0].pid}) ended while it was waited for")
        stopped = [each for each in self.workers if _is_stopped(each.pid)]
        if not self.is_reported and (stopped or now > self.since + _REPORT_AFTER_S):
            self.is_reported = True
            warn_user(self._report(now - self.since, stopped))

    def _report(self, waited_s: float, stopped: Sequence[Any]) -> str:
        doing = [
            f"worker {number} (process {each.pid}) {'is stopped' if each in stopped else 'reads'}{place}"
            for number, each in enumerate(self.workers)
            if (place := self.where(number)) or each in stopped
        ]
        if len(doing) > _MOST_SHOWN:
            doing[_MOST_SHOWN:] = [f"{len(doing) - _MOST_SHOWN} more"]
        repair = "DataLoader(timeout=...) makes a long wait an error"
        if stopped:
            repair = f"kill -CONT {' '.join(str(each.pid) for each in stopped)} lets it go on"
        return (
            f"shard_loader: a batch should come soon, got none for more than {waited_s:.0f} s: "
            f"{', '.join(doing) or 'no worker has one to read'}; {repair}"
        )


def _report_waits(running: Any, wait: _Wait) -> None:
    """Check the workers whenever torch's wait for a batch has timed out."""
    # Bind the class's function to a proxy: `running` will hold `try_get_data`, and a bound method
    # would make a reference cycle.
    try_get = partial(type(running)._try_get_data, weakref.proxy(running))

    def try_get_data(*timeout: float) -> tuple[bool, Any]:
        found: tuple[bool, Any] = try_get(*timeout)
        if not found[0]:
            wait.check()
        elif wait.since is not None:
            wait.end()
        return found

    running._try_get_data = try_get_data


def _is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped the process; False without /proc."""
    with suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] in "Tt"
    return False


def _kill_stopped(workers: Sequence[Any]) -> None:
    """Kill stopped workers: they cannot react to a request to end, and the program's exit would wait."""
    for each in workers:
        if each.pid and each.exitcode is None and _is_stopped(each.pid):
            each.kill()


def _end_by_kill(workers: Sequence[Any]) -> None:
    """Make `terminate` kill workers: a stopped worker does not react to SIGTERM."""
    for each in workers:
        each._popen.terminate = each._popen.kill


def _end_partial_messages(running: Any, wait: _Wait) -> None:
    """Make reads raise EOFError if a worker died while it sent a message.

    Otherwise the read would wait forever for the rest of the message.
    """
    # All workers write into one pipe. The living ones keep it open, so the read gets no end of
    # file.
    reader, workers = running._worker_result_queue._reader, running._workers
    arriving = select.poll()
    arriving.register(reader.fileno(), select.POLLIN)

    def read(handle: int, size: int) -> bytes:
        while not arriving.poll(_POLL_MS):
            if any(worker.exitcode for worker in workers):
                raise EOFError("a worker died while it was sending")
            wait.check()
        return os.read(handle, size)

    reader._recv = partial(type(reader)._recv, weakref.proxy(reader), read=read)


@dataclass(frozen=True, slots=True)
class _InitWithWatchdog:
    """Runs first in a worker: makes it end with its main process, and report failed sends."""

    fn: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        _torch_worker.ManagerWatchdog = _Watchdog  # type: ignore[assignment, misc]
        Queue._on_queue_feeder_error = partialmethod(_send_error, worker)  # type: ignore[attr-defined]
        if self.fn is not None:
            self.fn(worker)


class _SendError(ExceptionWrapper):
    """A placeholder for a batch that a worker could not send; torch's loader raises it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def reraise(self) -> None:
        raise WorkerError(self.text)


def _send_error(queue: Any, worker: int, error: Exception, item: Any) -> None:
    """Send an error instead of a batch; Python would only print it, and the loader would hang."""
    if not (isinstance(item, tuple) and len(item) == 2 and type(item[0]) is int):
        # The item belongs to a user's own queue: print the error, as Python would.
        traceback.print_exception(error)
        return
    number, batch = item
    num_bytes = sum(each.nbytes for each in tree_leaves(batch) if isinstance(each, Tensor))
    repair = f"; {_room()}" if _is_full(error) else ""
    text = (
        f"shard_loader: worker {worker} (process {os.getpid()}) must be able to send its batches, got one "
        f"of {num_bytes / 2**20:.1f} MiB and {str(error) or repr(error)}{repair}"
    )
    queue.put((number, _SendError(text)))


def _is_full(error: Exception) -> bool:
    """Return whether torch found no room for shared memory."""
    return "shared memory" in str(error) and "No space left on device" in str(error)


def _room() -> str:
    found = os.statvfs(_SHARED)
    return (
        f"{_SHARED} has {found.f_blocks * found.f_frsize / 2**20:.1f} MiB for all workers: enlarge it "
        "(docker run --shm-size=8g), or use smaller batches, fewer workers or a lower prefetch_factor"
    )


class _Watchdog:
    """Checks in a worker whether its main process is alive.

    Torch compares the worker's parent with the parent at the worker's start. The parent at the start
    may be the process that adopted the worker, or a fork server, which lives as long as its children.
    """

    def is_alive(self) -> bool:
        main = parent_process()
        assert main is not None
        if isinstance(current_process(), ForkServerProcess):
            return main.is_alive()
        # `is_alive` would not notice the end: it watches a pipe, which forked workers hold open for
        # each other.
        return os.getppid() == main.pid


def lost_workers(
    running: Any, where: Callable[[int], str] = lambda _: "", *, after: Exception | None = None
) -> str:
    """List the workers of an iterator that have died: `worker 1 (process 31) killed by SIGKILL`.

    `where` describes what a worker was reading. If a death may explain the error `after`, wait for
    processes that are about to end. Return "" if all workers live.
    """
    workers = getattr(running, "_workers", [])
    if isinstance(after, _BROKEN):
        ended = wait([worker.sentinel for worker in workers], _PATIENCE_S)
        for worker in workers:
            if worker.sentinel in ended:
                worker.join(_PATIENCE_S)
    is_open = not getattr(running, "_shutdown", True)
    # A worker of a stream may have ended with exit code 0, because its part of the stream has
    # ended.
    may_end = isinstance(getattr(running, "_dataset", None), IterableDataset)
    return ", ".join(
        f"worker {number} (process {worker.pid}) {_ending(worker.exitcode)}{where(number)}"
        for number, worker in enumerate(workers)
        if is_open and not worker.is_alive() and not (may_end and worker.exitcode == 0)
    )


def worker_error(lost: str, meanwhile: str = "") -> WorkerError:
    """Make the error for a result of `lost_workers`; `meanwhile` names what the loop waited for."""
    hint = next((hint for name, hint in _HINTS.items() if name in lost), None)
    return WorkerError(
        f"shard_loader: workers must live until the loop ends, got {lost}{meanwhile}; "
        f"{hint or 'num_workers=0 shows where it happens'}"
    )


def _ending(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"killed by {signal.Signals(-exit_code).name}"


class WorkerPool:
    """The workers of one DataLoader, for one pass at a time; `where` describes what a worker is reading."""

    def __init__(self, loader: DataLoader[Any], where: Callable[[int], str]) -> None:
        self.loader = loader
        self._where = where
        self._running: Any = None

    def start(self) -> None:
        """Begin a pass, which ends the previous one."""
        self._running = start_workers(self.loader, self._where)

    def items(self) -> Iterator[Any]:
        """Yield the items that the loader returns in this pass."""
        while True:
            try:
                item = next(self._running)
            except StopIteration as end:
                # A StopIteration with arguments is a worker's error, which torch raises again, and
                # not the end.
                if end.args:
                    raise RuntimeError(*end.args) from end
                return
            except Exception as error:
                if _is_full(error) and not isinstance(error, WorkerError):
                    error.add_note(f"shard_loader: {_room()}")
                if hasattr(self._running, "_workers"):
                    # The user may keep the error. Its traceback refers to torch's frames, which
                    # would keep the workers alive.
                    traceback.clear_frames(error.__traceback__)
                raise
            yield item

    def drop_rest(self) -> None:
        """Make workers stop reading this pass. By default, do nothing: the next `start` drops its batches."""

    def close(self) -> None:
        """End the workers. Dropping them is not enough: a stored error's frames refer to them."""
        self.drop_rest()
        if hasattr(self._running, "_workers"):
            _kill_stopped(self._running._workers)
            self._running._shutdown_workers()
        self._running = None

    def lost(self, *, after: Exception | None = None) -> str:
        """List the workers that have died, as `lost_workers` does."""
        return lost_workers(self._running, self._where, after=after)


Pool = TypeVar("Pool", bound=WorkerPool)


class IdlePools(Generic[Pool]):
    """The pools of persistent workers that no pass uses: each pass has a pool to itself."""

    def __init__(self, make: Callable[[], Pool], is_persistent: bool) -> None:
        self._make = make
        self._is_persistent = is_persistent
        self._idle: list[Pool] = []

    def take(self) -> Pool:
        """Return an idle pool whose workers live, or a new one."""
        while self._idle:
            pool = self._idle.pop()
            if not pool.lost():
                return pool
            pool.close()
        return self._make()

    def give_back(self, pool: Pool, *, failed: bool) -> None:
        """Keep a pool for the next pass; end workers that failed or are not persistent."""
        if self._is_persistent and not failed and not pool.lost():
            pool.drop_rest()
            self._idle.append(pool)
        else:
            pool.close()


class WorkerProgress:
    """The batch and the sample that each worker reads, in shared memory; -1 means none."""

    def __init__(self, num_workers: int) -> None:
        self._rows = torch.full((num_workers, 2), -1)
        self._rows.share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, number: int) -> None:
        """Record that this worker starts to read batch `number`."""
        self._row()[:] = number, -1

    def at(self, place: int) -> None:
        """Record that this worker reads the sample at that place of the batch."""
        self._row()[1] = place

    def end(self) -> None:
        """Record that this worker has read the batch."""
        self._row()[0] = -1

    def _row(self) -> Any:
        info = get_worker_info()
        assert info is not None
        # NumPy writes a number in a tenth of the time that a tensor takes.
        return self._rows.numpy()[info.id]

    def of(self, worker: int) -> tuple[int, int] | None:
        """Return the batch that a worker reads, and the place in it; None between batches."""
        number, place = self._rows[worker].tolist()
        return None if number < 0 else (number, place)
