"""DataLoader workers that died: raise it where the loop waits for a batch, with worker, signal and sample.

Torch alone raises in the main thread wherever that is when a worker dies, in the middle of a step
too, and names no sample. Every part of the watching here guards a fault that a test shows:
tests/data/test_workers.py (errors in the middle of a step, a message that a worker sent in part)
and tests/data/test_workers_end.py (workers that outlive a killed process).
"""

from __future__ import annotations

import os
import select
import signal
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import current_process, parent_process
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pickle import UnpicklingError
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as _torch_worker

from accel_fn.errors import WorkerError

_PATIENCE_S = 0.5  # a connection may be seen to break before the worker's process has ended
_POLL_MS = 200
_HINTS = {
    "SIGKILL": "was there memory enough? fewer workers take less",
    "SIGBUS": "was there room in /dev/shm? fewer workers take less",
}
_BROKEN = (OSError, EOFError, RuntimeError, UnpicklingError)
"""Errors of reading from a worker that has died."""


def make_loader(
    data: Any, *, worker_init_fn: Callable[[int], None] | None = None, **options: Any
) -> DataLoader[Any]:
    """Make a DataLoader for `start_workers`, whose items are taken as they are."""
    init = _WorkerInit(worker_init_fn)
    return DataLoader(data, batch_size=None, collate_fn=identity, worker_init_fn=init, **options)


def identity(batch: Any) -> Any:
    """Return it: a collate_fn for items that are batches already."""
    return batch


def start_workers(loader: DataLoader[Any]) -> Any:
    """Return the loader's iterator; a death of its workers is raised by `next` alone."""
    try:
        running: Any = iter(loader)
    except RuntimeError as error:
        if "DataLoader worker (pid" in str(error):  # torch saw a death while it started others
            raise worker_error(str(error).strip()) from error
        raise
    if getattr(running, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(running))  # type: ignore[attr-defined]
        running._worker_pids_set = False
        _end_partial_messages(running)
    return running


def _end_partial_messages(running: Any) -> None:
    """Raise EOFError where a worker died in the middle of sending, else the read would never return."""
    reader, workers = running._worker_result_queue._reader, running._workers
    arriving = select.poll()
    arriving.register(reader.fileno(), select.POLLIN)

    def read(handle: int, size: int) -> bytes:
        while not arriving.poll(_POLL_MS):
            if any(worker.exitcode for worker in workers):
                raise EOFError("a worker died while it was sending")
        return os.read(handle, size)

    reader._recv = partial(type(reader)._recv, weakref.proxy(reader), read=read)


@dataclass(frozen=True, slots=True)
class _WorkerInit:
    """Runs first in a worker: it ends with its main process."""

    fn: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        _torch_worker.ManagerWatchdog = _Watchdog  # type: ignore[assignment, misc]
        if self.fn is not None:
            self.fn(worker)


class _Watchdog:
    """Return whether a worker's main process lives.

    Torch compares parents once the worker has started: that may be the process that adopted it, or
    a fork server, which lives as long as its children.
    """

    def is_alive(self) -> bool:
        main = parent_process()
        assert main is not None
        if isinstance(current_process(), ForkServerProcess):
            return (
                main.is_alive()
            )  # forked workers cannot use it: they hold its pipe open for each other
        return os.getppid() == main.pid


def lost_workers(
    running: Any, where: Callable[[int], str] = lambda _: "", *, after: Exception | None = None
) -> str:
    """List the workers of an iterator that have died: `worker 1 (process 31) killed by SIGKILL`.

    `where` adds what a worker was reading. `after` is an error that a death may explain: a process
    that is about to end is then awaited. Empty where all live.
    """
    workers = getattr(running, "_workers", [])
    if isinstance(after, _BROKEN):
        ended = wait([worker.sentinel for worker in workers], _PATIENCE_S)
        for worker in workers:
            if worker.sentinel in ended:
                worker.join(_PATIENCE_S)
    is_open = not getattr(running, "_shutdown", True)
    may_end = isinstance(getattr(running, "_dataset", None), IterableDataset)
    return ", ".join(
        f"worker {number} (process {worker.pid}) {_ending(worker.exitcode)}{where(number)}"
        for number, worker in enumerate(workers)
        if is_open and not worker.is_alive() and not (may_end and worker.exitcode == 0)
    )


def worker_error(lost: str, meanwhile: str = "") -> WorkerError:
    """Make the error for what `lost_workers` returned; `meanwhile` names what the loop waited for."""
    hint = next((hint for name, hint in _HINTS.items() if name in lost), None)
    return WorkerError(
        f"shard_loader: workers must live until the loop ends, got {lost}{meanwhile}; "
        f"{hint or 'num_workers=0 shows where it happens'}"
    )


def _ending(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"killed by {signal.Signals(-exit_code).name}"
