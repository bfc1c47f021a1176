"""Names beyond the public ones that the library's own tests read or patch, on one page.

Nothing here is for users: names and meaning change with the code. If a file of the library
moves, only this page changes, and no test.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import patch

import torch

from accel_fn.checkpoint import background, compare, files, store, tensors
from accel_fn.checkpoint.background import Writing
from accel_fn.checkpoint.manifest import read_manifest
from accel_fn.checkpoint.tensors import Share
from accel_fn.checkpoint.weights import export_model
from accel_fn.core import primitives, update
from accel_fn.core import restored as rng
from accel_fn.core import step as step_file
from accel_fn.core.dtensor import axes_of, fill, local, shard_like, whole
from accel_fn.core.given_batches import samples_of
from accel_fn.core.grads import global_norm
from accel_fn.core.primitives import num_calls, start_total, waiting
from accel_fn.core.ranks import Ranks as ModelRanks
from accel_fn.core.signed import signed, verified
from accel_fn.core.state import DistState
from accel_fn.core.step import Step
from accel_fn.core.update import apply_update, follow_parameters, multiply
from accel_fn.core.warn import warn_user
from accel_fn.data import prefetch, workers
from accel_fn.data.loader import ShardedLoader
from accel_fn.data.set_epoch import InEpoch
from accel_fn.observe import progress
from accel_fn.observe.log_to import _NAMES
from accel_fn.parallel import file_lock, messages, rendezvous
from accel_fn.parallel import watchdog as watchdog_file
from accel_fn.parallel.hang_report import Entry, Ranks, Stack
from accel_fn.parallel.local_sgd import average_ranks
from accel_fn.parallel.mesh import make_mesh
from accel_fn.parallel.messages import Channel, open_channel
from accel_fn.parallel.rendezvous import JoiningRank, meet
from accel_fn.parallel.same_on_all_ranks import check_same
from accel_fn.parallel.stores import FolderStore, SignedStore
from accel_fn.parallel.tp.draws import draw_by_shard, may_draw
from accel_fn.parallel.watchdog import StoreLog, StoreWatchdog
from accel_fn.testing import simulation
from accel_fn.transforms.compile.optimizer_in_graph import keeps_tensors
from accel_fn.transforms.schedule.advance import BatchSchedule, DeviceSchedule

# All names that this page imports for tests, and some that it defines.
__all__ = [
    "Channel",
    "Entry",
    "FolderStore",
    "InEpoch",
    "JoiningRank",
    "ModelRanks",
    "Ranks",
    "Share",
    "SignedStore",
    "Stack",
    "StoreLog",
    "StoreWatchdog",
    "Writing",
    "apply_update",
    "axes_of",
    "check_fits_in_graph",
    "check_same",
    "count_report_and_wait",
    "ddp_of",
    "draw_by_shard",
    "export_model",
    "fill",
    "follow_parameters",
    "global_norm",
    "kept_gradients",
    "local",
    "make_mesh",
    "may_draw",
    "meet",
    "multiply",
    "num_calls",
    "open_channel",
    "place_of_rate",
    "read_manifest",
    "shard_like",
    "signed",
    "start_total",
    "verified",
    "waiting",
    "warn_user",
    "whole",
    "with_multiply",
]

# ---- step

kept_gradients = step_file._cloned


def ddp_of(step: Step) -> Any:
    """Return torch's DistributedDataParallel of a step."""
    return step.strategy.ddp  # type: ignore[attr-defined]


def with_multiply(multiply: Callable[[Any, Any], None]) -> AbstractContextManager[Any]:
    """Make updates call this function instead of `multiply`, which applies an open factor."""
    return patch.object(update, "multiply", multiply)


# ---- ranks

HANG_EXIT_CODE = watchdog_file.EXIT_CODE

# For `monkeypatch.setattr(*NAME, seconds)`: the time for which rank 0 waits until the other ranks
# have read its error, and the time for which a watchdog waits for the entry of a rank that has
# left.
LINGER_S = (rendezvous, "_LINGER_S")
SLACK_S = (watchdog_file, "_SLACK_S")


def reasons_to_end(watchdog: StoreWatchdog, now: float) -> list[str]:
    """Make a watchdog check its waits at the time `now`; return why it would end the process."""
    reasons: list[str] = []
    with mock.patch.object(watchdog, "_end", side_effect=lambda *given: reasons.append(given[0])):
        watchdog._check(now)
    return reasons


def last_wait(watchdog: StoreWatchdog) -> str:
    """Return the collective that a watchdog recorded last."""
    return str(watchdog._last)


def is_timed(state: DistState) -> bool:
    """Return whether the watchdog of a state is timing a step."""
    assert isinstance(state.watchdog, StoreWatchdog)
    return state.watchdog._step_began is not None


write_report = watchdog_file._write


def count_report_and_wait(watchdog: StoreWatchdog, num_ranks: int) -> None:
    """Make a rank that has reported wait until `num_ranks` ranks have reported."""
    watchdog._wait_for_reports(num_ranks)


@contextmanager
def forged_messages(data: bytes) -> Iterator[None]:
    """Make ranks receive these bytes instead of their peers' pickles."""
    with (
        mock.patch.object(primitives, "signed", return_value=data),
        mock.patch.object(messages, "signed", return_value=data),
    ):
        yield


def use_device_backend(backend_of: Callable[[Any], Any]) -> None:
    """Replace the backend of a world's device, such as NCCL."""
    vars(rendezvous).update(nccl_of=backend_of, device_backend=backend_of)


exclusive_random = rng.exclusive_random
"""Lets one simulated rank at a time use the random generators, and restores them."""

derive_random = rng.derive_random
"""Seeds the random generators of a rank that the saved run did not have."""


@contextmanager
def simulations_apart(**limits: int) -> Iterator[None]:
    """Keep worlds and threads of simulations in this context from other tests; join lost threads at its end.

    `max_lost_sockets` and `max_idle_sockets` limit the sockets of failed and of waiting worlds.
    """
    changed: dict[str, Any] = {f"_{name.upper()}": value for name, value in limits.items()}
    changed |= {
        "_lost": simulation._LostThreads(),
        "_idle": simulation._IdleWorlds(),
        "_UNUSED_S": 0.1,
    }
    with mock.patch.multiple(simulation, **changed):
        yield
        simulation._lost.join_oldest()
        simulation._idle.take((1, 1.0, ()))


# ---- data


def prefetch_threads() -> list[threading.Thread]:
    """List the living threads that read for `prefetch`."""
    return [each for each in threading.enumerate() if isinstance(each, prefetch.Reader)]


def overlook_stopped_workers() -> None:
    """Make this process treat stopped workers as running ones, until the process ends."""

    def is_stopped(pid: int) -> bool:
        return pid < 0

    workers._is_stopped = is_stopped


def counted_batches(loader: ShardedLoader[Any]) -> Iterator[tuple[Any, int | None]]:
    """Yield the batches of epoch 0, with the number of samples from which each was made."""
    for batch in loader._source.batches(0, 0):
        yield batch, samples_of(batch)


# ---- transforms

average_over_ranks = average_ranks.average
"""Replaces tensors by their weighted mean over ranks, as `local_sgd` does."""

check_fits_in_graph = keeps_tensors


def place_of_rate(transform: Any) -> str:
    """Return "device" or "host", where a schedule computes rates; "batches" if it counts batches."""
    kinds = {DeviceSchedule: "device", BatchSchedule: "batches"}
    return kinds.get(type(transform), "host")


# ---- checkpoint

_LIMITS: dict[str, list[tuple[Any, str]]] = {
    "report of a batch": [(workers, "_REPORT_AFTER_S"), (prefetch, "_REPORT_AFTER_S")],
    "report of a write": [(background, "_REPORT_AFTER_S")],
    "share of a rank": [(background, "_TIMEOUT_S")],
    "share of a lost rank": [(background, "_TIMEOUT_AFTER_LOSS_S")],
    "tries for a lock": [(file_lock, "_TRIES")],
    "delay of a bar": [(progress, "_DELAY_S")],
    "bytes of a block": [(tensors, "_BLOCK_BYTES")],
}


def set_limit(name: str, value: float) -> float:
    """Set a limit of this process, such as a time or a size; return the earlier value."""
    before: float
    for module, attribute in _LIMITS[name]:
        before = getattr(module, attribute)
        setattr(module, attribute, value)
    return before


@contextmanager
def limited(name: str, value: float) -> Iterator[None]:
    """Set a limit inside the context."""
    before = set_limit(name, value)
    try:
        yield
    finally:
        set_limit(name, before)


def hashes_of_frozen() -> tuple[Any, str]:
    """Return the owner and the name of the function that reads frozen parameters to hash them."""
    return compare, "_hashes"


@contextmanager
def failing(step: str, error: Exception, *, in_thread: str) -> Iterator[None]:
    """Raise an error at the first background copy, or at the first start of a thread that writes.

    `step` is "copy" or "start"; the error is raised in a thread whose name begins with `in_thread`.
    """
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


def finish_saving(state: DistState, step: Step) -> None:
    """Wait for the background save; if it failed on one rank, all ranks raise."""
    background.finish_writing(step.notes, state, "save")


@contextmanager
def saves_killed_after(num_files: int) -> Iterator[None]:
    """Kill each save after `num_files` files: the next file is half written, and no file is removed."""
    write_file, left = files.write_file, itertools.count(num_files, -1)

    def writing(path: Path, *arguments: Any) -> Any:
        if next(left) <= 0:
            path.write_bytes(b"half")
            raise OSError("killed")
        return write_file(path, *arguments)

    with (
        mock.patch.object(tensors, "write_file", writing),
        mock.patch.object(store, "write_file", writing),
        mock.patch.object(store.NewCheckpoint, "discard"),
    ):
        yield


# ---- observe

LOGGED_NAMES = frozenset(_NAMES)
"""The names that the step's own values have in a line of a log."""

LOCK_TRIES = (file_lock, "_TRIES")
"""For `monkeypatch.setattr(*LOCK_TRIES, number)`: the number of times that a second run tries to
lock a log."""


def recorders(step: Step) -> list[Any]:
    """List the objects that read the device's values for the logs of a step."""
    return [vars(each)["_recorder"] for each in step.observers.every if "_recorder" in vars(each)]


# ---- many ranks


def reading_from(num_ranks: int) -> Callable[[], None]:
    """Return a function that reads a step's message as if `num_ranks` ranks had sent theirs."""
    head = struct.pack("5d", 0.5, 0.0, 8.0, 2.0, 8.0) + b"losses 7".ljust(24, b"\0")
    heads = object.__new__(primitives._Heads)
    heads._received = torch.frombuffer(bytearray(head * num_ranks), dtype=torch.uint8)
    heads._state, heads._function = DistState(world_size=num_ranks), "step"
    heads._work = mock.Mock()
    return primitives.PendingTotal(torch.zeros(5).double(), heads, nullcontext()).wait
