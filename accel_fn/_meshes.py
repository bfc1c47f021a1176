"""Where shards live: the ranks of a world as torch's mesh, and the groups that it talks through.

A group of a process is torch's own, and so is its mesh. Groups of simulated ranks are known to
nobody, since torch's table of them is one for all threads of the process; their mesh is made by
hand. That rests on private names of torch; tests/unit/test_torch_internals.py says so
loudly when one of them changes.
"""

from __future__ import annotations

import ctypes
import itertools
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, _register_process_group
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel_fn._comm import broadcast, group_of
from accel_fn._state import DistState

_TIMEOUT_S = 30.0
_numbers = (
    itertools.count()
)  # torch finds a group by its name, and the ranks of threads share a table


def make_mesh(state: DistState, replicate: int) -> DeviceMesh:
    """The world as `replicate` groups of shards: of one axis, or of two where there are several."""
    shape: tuple[int, ...] = (state.world_size,)
    names: tuple[str, ...] = ("shard",)
    if replicate > 1:
        shape, names = (replicate, state.world_size // replicate), ("replicate", "shard")
    kind = state.device.type
    if state.world_size == 1:
        alone = ProcessGroup(HashStore(), 0, 1)
        return _mesh_by_hand(kind, 0, shape, names, [named(alone)] * len(names))
    group = group_of(state, "build")
    if not _is_known(group):
        return _mesh_by_hand(kind, state.rank, shape, names, _groups_by_hand(state, group, shape))
    if replicate == 1:
        return DeviceMesh.from_group(group, kind, mesh_dim_names=names)
    return init_device_mesh(kind, shape, mesh_dim_names=names)


def _is_known(group: ProcessGroup) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False


def _mesh_by_hand(
    kind: str, rank: int, shape: tuple[int, ...], names: tuple[str, ...], groups: list[ProcessGroup]
) -> DeviceMesh:
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    mesh = DeviceMesh(kind, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
    mesh._dim_group_names = [group.group_name for group in groups]
    return mesh


def _groups_by_hand(
    state: DistState, group: ProcessGroup, shape: tuple[int, ...]
) -> list[ProcessGroup]:
    """This rank's group along every axis of the mesh."""
    if len(shape) == 1:
        return [group]
    row, column = divmod(state.rank, shape[1])
    number, store = torch.tensor(next(_numbers)), group.get_group_store()
    broadcast(number, state, 0, "build")  # rank 0's: another one each time
    places = [(f"column {column}", row, shape[0]), (f"row {row}", column, shape[1])]
    return [
        make_group(PrefixStore(f"{int(number)} {where}", store), place, size, _TIMEOUT_S)
        for where, place, size in places
    ]


def make_group(store: Store, rank: int, world_size: int, timeout_s: float) -> ProcessGroup:
    """A thread's end of a Gloo group; returns once all ranks have called it."""
    gloo = dist.ProcessGroupGloo(
        PrefixStore("gloo", store), rank, world_size, timedelta(seconds=timeout_s)
    )
    group = ProcessGroup(PrefixStore("group", store), rank, world_size)
    kind = ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo)
    # Destroying such a group can deadlock on the GIL: one reference too many keeps it to the end.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    return named(group)


def named(group: ProcessGroup) -> ProcessGroup:
    """The group under a name of its own, by which a mesh finds it."""
    group._set_group_name(cast("Any", f"accel_fn {next(_numbers)}"))
    _register_process_group(group.group_name, group)
    return group
