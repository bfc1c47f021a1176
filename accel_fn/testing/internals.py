"""What the library's own tests look at or break beyond the public names, on one page.

Nothing here is for users: names and meaning change with the code. When a file of the library
moves, this page is what follows it, and no test does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from accel_fn.base import file_lock
from accel_fn.base.state import DistState
from accel_fn.comm import meeting, messages, primitives, rendezvous
from accel_fn.comm.dtensor import axes_of, fill, local, shard_like, whole
from accel_fn.comm.meeting import Place, meet
from accel_fn.comm.mesh import make_mesh
from accel_fn.comm.messages import open_channel
from accel_fn.comm.primitives import num_calls, signed, start_total, verified, waiting
from accel_fn.comm.rendezvous import meet_at
from accel_fn.comm.stores import FolderStore, SignedStore
from accel_fn.comm.watchdog import watchdog as watchdog_module
from accel_fn.comm.watchdog.hang_report import Ranks, Stack
from accel_fn.comm.watchdog.store_log import Entry, StoreLog
from accel_fn.comm.watchdog.watchdog import Abort, StoreWatchdog
from accel_fn.observe.log_to import _NAMES
from accel_fn.step.grads import global_norm
from accel_fn.step.observers import observers
from accel_fn.step.same_on_all_ranks import check_same
from accel_fn.step.step import Step

__all__ = [  # what tests call as it is
    "Abort",
    "Entry",
    "FolderStore",
    "Place",
    "Ranks",
    "SignedStore",
    "Stack",
    "StoreLog",
    "StoreWatchdog",
    "axes_of",
    "check_same",
    "fill",
    "global_norm",
    "local",
    "make_mesh",
    "meet",
    "meet_at",
    "num_calls",
    "open_channel",
    "shard_like",
    "signed",
    "start_total",
    "verified",
    "waiting",
    "whole",
]

# ---- step

# ---- ranks

HANG_EXIT_CODE = watchdog_module.EXIT_CODE

# For `monkeypatch.setattr(*NAME, seconds)`: how long rank 0 serves those that it has failed, and how
# long a watchdog waits for the entry of a rank that has left.
LINGER_S = (meeting, "_LINGER_S")
SLACK_S = (watchdog_module, "_SLACK_S")


def reasons_to_end(watchdog: StoreWatchdog, now: float) -> list[str]:
    """Let a watchdog look at its waits at this time; return why it would end the process."""
    reasons: list[str] = []
    with mock.patch.object(watchdog, "_end", side_effect=lambda *given: reasons.append(given[0])):
        watchdog._check(now)
    return reasons


def last_wait(watchdog: StoreWatchdog) -> str:
    """The collective that a watchdog has noted last."""
    return str(watchdog._last)


def is_timed(state: DistState) -> bool:
    """Does the watchdog of a state time a step at this moment?"""
    assert isinstance(state.watchdog, StoreWatchdog)
    return state.watchdog._step_began is not None


write_report = watchdog_module._write


@contextmanager
def withdrawing_late(delay_s: float) -> Iterator[None]:
    """Let a rank that gives up a meeting take so long times its number to say so."""
    withdraw = meeting._Meeting._withdraw

    def late(self: meeting._Meeting) -> None:
        time.sleep(delay_s * self._place.rank)
        withdraw(self)

    with mock.patch.object(meeting._Meeting, "_withdraw", late):
        yield


@contextmanager
def forged_messages(data: bytes) -> Iterator[None]:
    """Have ranks get these bytes, in place of what their peers pickle for them."""
    with (
        mock.patch.object(primitives, "signed", return_value=data),
        mock.patch.object(messages, "signed", return_value=data),
    ):
        yield


def use_device_backend(backend_of: Callable[[Any], Any]) -> None:
    """Let a world take this for the backend of its device, such as NCCL."""
    vars(rendezvous).update(nccl_of=backend_of, device_backend=backend_of)


# ---- data

# ---- transforms

# ---- checkpoint

# ---- observe

LOGGED_NAMES = frozenset(_NAMES)
"""The names of values in a line of a log that are the step's own."""

LOCK_TRIES = (file_lock, "_TRIES")
"""For `monkeypatch.setattr(*LOCK_TRIES, number)`: how often a second run tries to lock a log."""


def recorders(step: Step) -> list[Any]:
    """What reads the device's values for the logs of a step."""
    return [each._recorder for each in observers([step.plan])]
