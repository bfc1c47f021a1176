"""Device meshes: the ranks of a world as torch's mesh, and their process groups.

Real processes get torch's own mesh. Torch keeps one table of groups for all threads of a process, so
groups of simulated ranks are not in it, and their mesh is made by hand. That uses private names of
torch; tests/step/test_torch_internals.py fails when one of them changes.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    HashStore,
    PrefixStore,
    Store,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel_fn.base.state import DistState
from accel_fn.comm.backends import nccl_of
from accel_fn.comm.primitives import broadcast, group_of

_TIMEOUT_S = 30.0
_NEVER_SENT = 1 << 30  # a tag
_numbers = itertools.count()  # for names: threads share torch's table of groups
_parts: dict[str, list[ProcessGroup]] = {}
"""Groups of simulated ranks along the axes of meshes, by the name of the group that they are cut from."""


def make_mesh(state: DistState, replicate: int) -> DeviceMesh:
    """Make a mesh of `replicate` groups of shards: one axis, or two if there are several groups."""
    ranks, names = torch.arange(state.world_size), ["shard"]
    if replicate > 1:
        ranks, names = ranks.view(replicate, -1), ["replicate", "shard"]
    kind = state.device.type
    if state.world_size == 1:
        alone = make_group(HashStore(), 0, 1, _TIMEOUT_S)
        return _MeshByHand(kind, 0, ranks, {"shard": alone})
    group = group_of(state, "build")
    if not _is_known(group):
        return _MeshByHand(kind, state.rank, ranks, _groups_by_hand(state, group, ranks))
    if replicate == 1:
        return DeviceMesh.from_group(group, kind, mesh_dim_names=tuple(names))
    mesh = init_device_mesh(kind, tuple(ranks.shape), mesh_dim_names=tuple(names))
    nccl = nccl_of(group)
    for part in mesh.get_all_groups() if nccl is not None else ():
        # torch gives new groups its own default.
        nccl_of(part)._set_default_timeout(nccl.options._timeout)
    return mesh


def _is_known(group: ProcessGroup) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False


class _MeshByHand(DeviceMesh):
    """A mesh of simulated ranks: torch would take the rank of the process."""

    def __init__(
        self, kind: str, rank: int, ranks: Tensor, groups: Mapping[str, ProcessGroup]
    ) -> None:
        super().__init__(kind, ranks, mesh_dim_names=tuple(groups), _init_backend=False, _rank=rank)
        self._dim_group_names = [group.group_name for group in groups.values()]
        self._shards: DeviceMesh = self
        if ranks.ndim > 1:
            row = ranks[rank // ranks.size(1)]
            self._shards = _MeshByHand(kind, rank, row, {"shard": groups["shard"]})

    def __getitem__(self, name: Any) -> DeviceMesh:
        assert name == "shard"
        return self._shards


def _groups_by_hand(
    state: DistState, group: ProcessGroup, ranks: Tensor
) -> dict[str, ProcessGroup]:
    """Make this rank's group along every axis of the mesh."""
    if ranks.ndim == 1:
        return {"shard": group}
    row, column = divmod(state.rank, ranks.size(1))
    number, store = torch.tensor(next(_numbers)), group.get_group_store()
    broadcast(number, state, 0, "build")  # rank 0's: another one each time

    def made(where: str, place: int, size: int) -> ProcessGroup:
        part = make_group(PrefixStore(f"{int(number)} {where}", store), place, size, _TIMEOUT_S)
        _parts.setdefault(group.group_name, []).append(part)
        return part

    return {
        "replicate": made(f"column {column}", row, ranks.size(0)),
        "shard": made(f"row {row}", column, ranks.size(1)),
    }


@cache
def _device() -> Any:
    """Return the Gloo device of all groups of this process: one thread, where each would have its own.

    Messages between threads of one process then take at most half the CPU time.
    """
    return dist.ProcessGroupGloo.create_default_device()


def make_group(store: Store, rank: int, world_size: int, timeout_s: float) -> ProcessGroup:
    """Make a thread's end of a Gloo group; returns once all ranks have called it."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout = [_device()], timedelta(seconds=timeout_s)
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, world_size, options)
    group = ProcessGroup(PrefixStore("group", store), rank, world_size)
    kind = ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo)
    # Destroying such a group can deadlock on the GIL, while a thread of Gloo's lets go of a tensor: one
    # reference too many keeps it to the end, or until `release_group`.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    # A mesh finds it by a name of its own.
    group._set_group_name(cast("Any", f"accel_fn {next(_numbers)}"))
    _register_process_group(group.group_name, group)
    return group


def close_group(group: ProcessGroup) -> None:
    """Close the connections of a group of `make_group`, and of its parts: who waits in it fails at once.

    Its peers fail with it. Gloo closes them after a time-out, and in no other way.
    """
    for each in (*_parts.get(group.group_name, ()), group):
        if each.size() > 1:
            peer = (each.rank() + 1) % each.size()
            with suppress(RuntimeError):
                each.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def release_group(group: ProcessGroup) -> None:
    """Let a group of `make_group`, in which nothing is under way, end with its other references.

    Its two threads and its sockets end with it, and those of its parts.
    """
    for each in (*_parts.pop(group.group_name, ()), group):
        _unregister_process_group(each.group_name)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(each))
