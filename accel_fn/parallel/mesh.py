"""Device meshes: the ranks of a world as torch's mesh, and their process groups.

Real processes get torch's own mesh. This mesh needs torch's table of groups, which all threads of a
process share. The groups of simulated ranks are not in this table, so this module makes the meshes
of simulated ranks by hand. It also makes the mesh of a world of one rank by hand. The code is here
and not in `testing/`, since `wrap_fsdp` makes meshes of all kinds. This module uses private names
of torch; tests/core/test_torch_internals.py fails when one of them changes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    FakeProcessGroup,
    HashStore,
    PrefixStore,
    _register_process_group,
)
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel_fn.core.primitives import broadcast, group_of, nccl_of
from accel_fn.core.state import Axis, DistState, check_state, check_world
from accel_fn.errors import StateError
from accel_fn.parallel.groups import make_group

_TIMEOUT_S = 30.0
# Numbers that make names unique: the keys of meshes made by hand in a group's store, and the names
# of silent groups.
_numbers = itertools.count()


def device_mesh(state: DistState) -> DeviceMesh:
    """Return torch's mesh of a state's axes, for `parallelize_module`, `fully_shard` and DTensors.

    Axes of one rank are left out. It works in `simulate` too, although torch has no default group
    there.

    Args:
        state: the state of all ranks. Without a mesh it has one axis, `dp`.

    Returns:
        A mesh of the state's own groups, with the names of its axes: `device_mesh(state)["tp"]`.

    Raises:
        ValueError: the state is the state of one axis (`along`).

    Cost: no collective.

    >>> import accel_fn as af
    >>> from accel_fn.testing import simulate
    >>> fn = lambda state: af.device_mesh(state)["tp"].size()
    >>> simulate(fn, mesh={"dp": 2, "tp": 3})
    [3, 3, 3, 3, 3, 3]
    """
    check_state("device_mesh", state)
    check_world("device_mesh", state)
    axes = [each for each in state.axes if each.world_size > 1]
    if not axes:
        group = _alone() if state.world_size == 1 else group_of(state, "device_mesh")
        axes = [Axis("dp", state.rank, state.world_size, group)]
    groups = {each.name: _group_along(each) for each in axes}
    ranks = torch.arange(state.world_size).view([each.world_size for each in axes])
    return _mesh_of(state, ranks, groups)


def make_mesh(state: DistState, replicate: int) -> DeviceMesh:
    """Make a mesh of `replicate` groups of shards: one axis, or two if there are several groups."""
    ranks, names = torch.arange(state.world_size), ["shard"]
    if replicate > 1:
        ranks, names = ranks.view(replicate, -1), ["replicate", "shard"]
    if state.world_size == 1:
        return _mesh_of(state, ranks, {"shard": _alone()})
    group = group_of(state, "build")
    if replicate == 1:
        return _mesh_of(state, ranks, {"shard": group})
    if not _is_known(group):
        return _mesh_of(state, ranks, _groups_by_hand(state, group, ranks))
    mesh = init_device_mesh(state.device.type, tuple(ranks.shape), mesh_dim_names=tuple(names))
    nccl = nccl_of(group)
    for part in mesh.get_all_groups() if nccl is not None else ():
        # torch gives new groups its own default time-out, so set the world's.
        nccl_of(part)._set_default_timeout(nccl.options._timeout)
    return mesh


@cache
def _alone() -> ProcessGroup:
    """Return a group of one rank.

    All states of one rank share the group, since no call on it waits.
    """
    return make_group(HashStore(), 0, 1, _TIMEOUT_S)


def _group_along(axis: Axis) -> ProcessGroup:
    if axis.group is None:
        raise StateError(
            f"device_mesh: state must have a group along {axis.name!r}, as init and simulate make it"
        )
    return axis.group


def _mesh_of(state: DistState, ranks: Tensor, groups: Mapping[str, ProcessGroup]) -> DeviceMesh:
    """Make a mesh of these groups, one per axis; by hand, if torch does not know them."""
    kind, names = state.device.type, tuple(groups)
    if not all(map(_is_known, groups.values())):
        return _MeshByHand(kind, state.rank, ranks, groups)
    parts = [*groups.values()]
    if len(parts) == 1:
        return DeviceMesh.from_group(parts[0], kind, mesh_dim_names=names)
    return DeviceMesh.from_group(parts, kind, mesh=ranks, mesh_dim_names=names)


def _is_known(group: ProcessGroup) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False


def silent_meshes(device: torch.device, shape: Mapping[str, int]) -> dict[str, DeviceMesh]:
    """Return one mesh for each axis of several ranks; its collectives send nothing.

    With these meshes, tensors without data (torch's fake tensors) are divided as on real ranks.
    Each mesh has only the first rank's place.

    Cost: no collective.

    >>> import torch, accel_fn as af
    >>> meshes = af.extend.silent_meshes(torch.device("cpu"), {"dp": 2, "tp": 4})
    >>> meshes["tp"].size()
    4
    """
    # The import registers what these collectives return for tensors without data.
    from torch.distributed._tools import fake_collectives  # noqa: F401

    several = {name: size for name, size in shape.items() if size > 1}
    size = math.prod(several.values())
    axes = [Axis(name, 0, its, _silent_group(device, its)) for name, its in several.items()]
    state = DistState(world_size=size, device=device, axes=tuple(axes))
    return {name: device_mesh(state)[name] for name in several} if several else {}


@cache
def _silent_group(device: torch.device, size: int) -> ProcessGroup:
    group = ProcessGroup(HashStore(), 0, size)
    kind = ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)
    group._register_backend(device, kind, FakeProcessGroup._create_internal(0, size))
    group._set_group_name(cast("Any", f"accel_fn silent {device.type} {size} {next(_numbers)}"))
    _register_process_group(group.group_name, group)
    return group


class _MeshByHand(DeviceMesh):
    """A mesh for simulated ranks. It has the rank of its thread; torch's mesh has the process's rank."""

    def __init__(
        self, kind: str, rank: int, ranks: Tensor, groups: Mapping[str, ProcessGroup]
    ) -> None:
        self._rank = rank
        super().__init__(kind, ranks, mesh_dim_names=tuple(groups), _init_backend=False, _rank=rank)
        # torch caches facts about a mesh's rank for all threads of a process. The cache key
        # includes `_thread_id`, so use the rank there: simulated ranks then share no entries.
        self._thread_id = rank
        self._dim_group_names = [group.group_name for group in groups.values()]
        self._pg_registry = {group.group_name: group for group in groups.values()}
        # `fully_shard` joins axes with `DeviceMesh._concatenate`. Replace it, so that joined axes
        # of a `_MeshByHand` keep this rank and its groups; other meshes still use torch's.
        DeviceMesh._concatenate = staticmethod(_concatenate)  # type: ignore[assignment, method-assign]

    def __getitem__(self, names: Any) -> DeviceMesh:
        wanted = (names,) if isinstance(names, str) else tuple(names)
        if wanted == self.mesh_dim_names:
            return self
        return self._part(self._get_slice_mesh_layout(wanted), wanted)

    def _part(self, layout: Any, names: tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of some axes as `DeviceMesh` makes it, but with the rank of this mesh."""
        part = object.__new__(_MeshByHand)
        part._rank = self._rank
        DeviceMesh.__init__(
            part,
            self.device_type,
            mesh_dim_names=names,
            _layout=layout,
            _rank_map=self._rank_map,
            _root_mesh=self._get_root_mesh(),
            _init_backend=False,
            _rank=self._rank,
        )
        part._thread_id = self._thread_id
        of_axes = dict(zip(self.mesh_dim_names or (), self._dim_group_names, strict=True))
        part._dim_group_names = [of_axes[name] for name in names]
        return part

    def _get_mesh_tensor_from_full_mesh(  # type: ignore[override]
        self, full_mesh: Tensor, current_rank: int | None = None
    ) -> Tensor:
        return DeviceMesh._get_mesh_tensor_from_full_mesh(full_mesh, self._rank)

    def get_rank(self) -> int:
        return self._rank

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        group: ProcessGroup = self.get_group(mesh_dim)
        return group.rank()


def _concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Join axes of one mesh, as `fully_shard` does on a model that is split over another axis."""
    root = meshes[0]._get_root_mesh()
    if not isinstance(root, _MeshByHand):
        return _concatenate_by_torch(meshes)
    return root[tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ())]


_concatenate_by_torch = DeviceMesh._concatenate


def _groups_by_hand(
    state: DistState, group: ProcessGroup, ranks: Tensor
) -> dict[str, ProcessGroup]:
    """Make this rank's group along every axis of the mesh."""
    if ranks.ndim == 1:
        return {"shard": group}
    row, column = divmod(state.rank, ranks.size(1))
    number, store = torch.tensor(next(_numbers)), group.get_group_store()
    # All ranks take rank 0's number, which no other mesh has.
    broadcast(number, state, 0, "build")

    def made(where: str, place: int, size: int) -> ProcessGroup:
        own = PrefixStore(f"{int(number)} {where}", store)
        return make_group(own, place, size, _TIMEOUT_S, part_of=group)

    return {
        "replicate": made(f"column {column}", row, ranks.size(0)),
        "shard": made(f"row {row}", column, ranks.size(1)),
    }
