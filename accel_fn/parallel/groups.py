"""Process groups along the axes of a mesh, and Gloo groups whose ranks are threads of one process.

This module uses private names of torch; tests/core/test_torch_internals.py fails when one of them
changes.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping
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

from accel_fn.core.mesh_axes import ranks_along
from accel_fn.core.primitives import group_of, nccl_of
from accel_fn.core.state import Axis, DistState

MakeGroup = Callable[[DistState, str, range], ProcessGroup | None]
"""A function that makes a group for a set of ranks along an axis. It returns this rank's end of the
group, or None if the rank is not in the set. All ranks call the function for every set of ranks
along every axis, in the same order."""
# The tag of a message that no rank ever sends.
_NEVER_SENT = 1 << 30
# Numbers for the names of groups: all threads share torch's table of groups, so names must be
# unique.
_numbers = itertools.count()
_groups: dict[str, list[ProcessGroup]] = {}
"""The open groups of `make_group`, by name. Each list holds a group, and then the groups that were
made as parts of it."""


def make_axes(state: DistState, shape: Mapping[str, int], make: MakeGroup) -> tuple[Axis, ...]:
    """Make the axes of a mesh with this shape, each with this rank's place and group."""
    axes = []
    for name, size in shape.items():
        own, group = ranks_along(shape, name, state.rank), None
        if size == state.world_size:
            group = state.group
        elif size > 1:
            rows = dict.fromkeys(ranks_along(shape, name, rank) for rank in range(state.world_size))
            groups = {row: make(state, name, row) for row in rows}
            group = groups[own]
        axes.append(Axis(name, own.index(state.rank), size, group))
    return tuple(axes)


def make_subgroup(
    state: DistState, name: str, ranks: range, *, backend: str, timeout_s: float
) -> ProcessGroup | None:
    """Make a group of some ranks. Every rank of the world must call this, even outside the group."""
    timeout = timedelta(seconds=timeout_s)
    group: ProcessGroup = dist.new_group(
        list(ranks), timeout=timeout, backend=backend, group_desc=name
    )
    if state.rank not in ranks:
        return None
    nccl = nccl_of(group_of(state, "init"))
    if nccl is not None:
        # Give NCCL a longer time-out than other backends have: the watchdog must report before NCCL
        # ends the process.
        nccl_of(group)._set_default_timeout(nccl.options._timeout)
    return group


@cache
def _device() -> Any:
    """Return the Gloo device, with one thread, that all groups of this process share.

    With one device per group, messages in a process would take at least twice the CPU time.
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

    If `part_of` is given, the new group is closed and released together with that group.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout = [_device()], timedelta(seconds=timeout_s)
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, world_size, options)
    group = ProcessGroup(PrefixStore("group", store), rank, world_size)
    kind = ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo)
    # Register the group under a name, by which a mesh finds the group.
    group._set_group_name(cast("Any", f"accel_fn {next(_numbers)}"))
    _register_process_group(group.group_name, group)
    # Destroying such a group can deadlock on the GIL, while a Gloo thread releases a tensor. So an
    # extra reference keeps the group until the process ends, or until `release_group`.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _groups.setdefault((part_of or group).group_name, []).append(group)
    return group


def num_connections(group: ProcessGroup) -> int:
    """Return how many sockets this rank holds open for a group and the groups that are part of it."""
    return sum(each.size() - 1 for each in _groups[group.group_name])


def close_group(group: ProcessGroup) -> None:
    """Close the connections of a group and of its parts. Pending calls fail at once, on all ranks.

    Gloo closes connections only after a time-out, so provoke a time-out.
    """
    for each in list(_groups[group.group_name]):
        if each.size() > 1:
            peer = (each.rank() + 1) % each.size()
            with suppress(RuntimeError):
                each.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def release_group(group: ProcessGroup) -> None:
    """Drop the extra reference to an idle group and its parts, so that their threads can end."""
    for each in _groups.pop(group.group_name):
        _unregister_process_group(each.group_name)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(each))
