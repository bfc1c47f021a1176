"""Gloo groups whose ranks are threads of one process, and a group of one rank alone.

Uses private names of torch; tests/step/test_torch_internals.py fails when one of them changes.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    PrefixStore,
    Store,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed import ProcessGroup

_NEVER_SENT = 1 << 30  # a tag
_SETTLE_S = 2.0
_numbers = itertools.count()  # for names: threads share torch's table of groups
_groups: dict[str, list[ProcessGroup]] = {}
"""Groups that are open, each with its parts behind it, by name."""


@cache
def _device() -> Any:
    """Return the Gloo device of all groups of this process: one thread, where each would have its own.

    Messages between threads of one process then take at most half the CPU time.
    """
    return dist.ProcessGroupGloo.create_default_device()


def make_group(
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    *,
    part_of: ProcessGroup | None = None,
) -> ProcessGroup:
    """Make a thread's end of a Gloo group; returns once all ranks have called it.

    A part is closed and released with the group that it is part of.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout = [_device()], timedelta(seconds=timeout_s)
    options._threads = 1  # in the order of calls: `_settle` relies on it
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, world_size, options)
    group = ProcessGroup(PrefixStore("group", store), rank, world_size)
    kind = ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo)
    # A mesh finds it by a name of its own.
    group._set_group_name(cast("Any", f"{_prefix()}{next(_numbers)}"))
    _register_process_group(group.group_name, group)
    _groups.setdefault((part_of or group).group_name, []).append(group)
    return group


def close_group(group: ProcessGroup) -> None:
    """Close the connections of a group and its parts: whoever waits in them fails at once, on all ranks.

    Gloo closes them after a time-out, and in no other way.
    """
    for each in list(_groups[group.group_name]):
        if each.size() > 1:
            peer = (each.rank() + 1) % each.size()
            with suppress(RuntimeError):
                each.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def release_group(group: ProcessGroup) -> None:
    """Let a group in which nothing is under way, and its parts, end with their other references.

    Their threads and sockets end with them. Destroying a group can deadlock on the GIL, while a thread
    of Gloo's lets go of a tensor.
    """
    for each in _groups.pop(group.group_name):
        _unregister_process_group(each.group_name)


def _settle() -> None:
    """Wait until Gloo's threads have let go of the tensors of all calls; keep the groups for ever.

    Such a thread needs Python for it, and aborts a process whose Python has ended.
    """
    groups = [
        each for name, parts in _groups.items() if name.startswith(_prefix()) for each in parts
    ]
    works = [each.allreduce([torch.zeros(1)]) for each in groups]
    deadline = time.monotonic() + _SETTLE_S
    for work in works:
        with suppress(RuntimeError):  # of a world that failed
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    for kept in (*groups, *works):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _prefix() -> str:
    """Begin the names of this process's groups: those of the process that forked it have no threads here."""
    return f"accel_fn {os.getpid()} "


atexit.register(_settle)
