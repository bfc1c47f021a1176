"""Device meshes: the ranks of a world as torch's mesh, and their process groups.

Real processes get torch's own mesh. Torch keeps one table of groups for all threads of a process, so
groups of simulated ranks are not in it, and their mesh is made by hand, as is that of a world of one,
which has no group. It stands here and not in `testing/`, since `wrap_fsdp` makes all of them. It uses
private names of torch; tests/step/test_torch_internals.py fails when one of them changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel_fn.base.state import DistState
from accel_fn.comm.backends import nccl_of
from accel_fn.comm.primitives import broadcast, group_of
from accel_fn.comm.thread_groups import make_group

_TIMEOUT_S = 30.0
_numbers = itertools.count()  # a store of its own for each mesh that is cut from a group


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
        # Torch caches by mesh what follows from a rank's place in it, for all threads of a process.
        self._thread_id = rank
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
        own = PrefixStore(f"{int(number)} {where}", store)
        return make_group(own, place, size, _TIMEOUT_S, part_of=group)

    return {
        "replicate": made(f"column {column}", row, ranks.size(0)),
        "shard": made(f"row {row}", column, ranks.size(1)),
    }
