"""What the library's own tests look at or break beyond the public names, on one page.

Nothing here is for users: names and meaning change with the code. When a file of the library
moves, this page is what follows it, and no test does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accel_fn.base import file_lock
from accel_fn.checkpoint import background, frozen
from accel_fn.checkpoint.background import Writing as Writing
from accel_fn.checkpoint.format import host_memory
from accel_fn.checkpoint.format.manifest import read_manifest as read_manifest
from accel_fn.checkpoint.format.write import Share as Share
from accel_fn.checkpoint.weights.export import export_model as export_model
from accel_fn.comm.messages import Channel as Channel
from accel_fn.data import prefetch, workers
from accel_fn.data.loader import ShardedLoader
from accel_fn.data.set_epoch import InEpoch as InEpoch
from accel_fn.observe import bar

# ---- step

# ---- ranks

# ---- data


def prefetch_threads() -> list[threading.Thread]:
    """List the living threads that read for `prefetch`."""
    return [each for each in threading.enumerate() if isinstance(each, prefetch.Reader)]


def overlook_stopped_workers() -> None:
    """Let this process take stopped workers for running ones, for good."""

    def is_stopped(pid: int) -> bool:
        return pid < 0

    workers._is_stopped = is_stopped


def counted_batches(loader: ShardedLoader[Any]) -> Iterator[tuple[Any, int | None]]:
    """Yield the batches of epoch 0, and of how many samples each was made."""
    source = loader._source
    for number, batch in enumerate(source.batches(0, 0)):
        yield batch, source.num_samples(0, number)


# ---- transforms

# ---- checkpoint

_LIMITS: dict[str, list[tuple[Any, str]]] = {
    "report of a batch": [(workers, "_REPORT_AFTER_S"), (prefetch, "_REPORT_AFTER_S")],
    "report of a write": [(background, "_REPORT_AFTER_S")],
    "share of a rank": [(background, "_TIMEOUT_S")],
    "share of a lost rank": [(background, "_TIMEOUT_AFTER_LOSS_S")],
    "tries for a lock": [(file_lock, "_TRIES")],
    "delay of a bar": [(bar, "_DELAY_S")],
    "bytes of a block": [(host_memory, "_BLOCK_BYTES")],
}


def set_limit(name: str, value: float) -> float:
    """Set how long this process waits for something, or how large it is; return what it was."""
    before: float
    for module, attribute in _LIMITS[name]:
        before = getattr(module, attribute)
        setattr(module, attribute, value)
    return before


@contextmanager
def limited(name: str, value: float) -> Iterator[None]:
    """Set such a limit for as long as the context lasts."""
    before = set_limit(name, value)
    try:
        yield
    finally:
        set_limit(name, before)


def hashes_of_frozen() -> tuple[Any, str]:
    """The owner and the name of the function that reads frozen parameters for their hashes."""
    return frozen, "_hashes"


@contextmanager
def failing(step: str, error: Exception, *, in_thread: str) -> Iterator[None]:
    """Raise the error at the first `copy` for a save in the background, or `start` of its thread."""
    owner, name = {"copy": (background, "_copied"), "start": (Writing, "start")}[step]
    function, left = getattr(owner, name), [in_thread]

    def once(*arguments: Any) -> Any:
        if left and threading.current_thread().name.startswith(left[0]):
            left.clear()
            raise error
        return function(*arguments)

    setattr(owner, name, once)
    try:
        yield
    finally:
        setattr(owner, name, function)


# ---- observe
