"""DTensors, of which a rank holds a shard: that shard, and whole tensors.

They are known by their method `to_local`: importing torch's module takes time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor, nn

from accel_fn.base.state import DistState
from accel_fn.comm.primitives import gather_numbers

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_WHOLE = (Tensor, nn.Parameter)
"""Most tensors: a test of the type is quicker than that of an attribute."""


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Does a rank hold only a shard of this tensor?"""
    return type(value) not in _WHOLE and hasattr(value, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the same memory."""
    if not is_sharded(tensor):
        return tensor
    return cast("DTensor", tensor.detach()).to_local()


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor; if it is sharded, every rank calls this.

    Cost: for shards, one gather.
    """
    if not is_sharded(tensor) or tensor.device_mesh.size() == 1:
        return local(tensor).detach()
    return cast("DTensor", tensor.detach()).full_tensor()


def norm_over_shards(norm: Tensor, of: Sequence[Tensor]) -> Tensor:
    """Return the norm of whole tensors from that of this rank's shards.

    Cost: one collective of a number.
    """
    assert is_sharded(of[0])
    mesh = of[0].device_mesh
    total: Tensor = torch.linalg.vector_norm(gather_numbers(norm, mesh.get_group(mesh.ndim - 1)))
    return total


def fill(tensor: Tensor, whole: Tensor) -> None:
    """Overwrite a tensor by a whole one; if it is sharded, by this rank's part."""
    if is_sharded(tensor):
        group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
        parts, place = whole.chunk(group.size(), dim=0), group.rank()
        if place < len(parts):
            local(tensor).copy_(parts[place])
    else:
        tensor.copy_(whole)


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a whole tensor, cut like another one."""
    cut = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
    fill(cut, value.detach())
    return cut


def place_of(tensor: Tensor) -> int:
    """Return the index of this rank's shard; 0 for a whole tensor."""
    return axes_of(tensor)[0].rank if is_sharded(tensor) else 0


def axes_of(tensor: Tensor) -> list[DistState]:
    """Return the axes of the mesh that a tensor is sharded over, the one that it is cut along first."""
    assert is_sharded(tensor)
    groups = tensor.device_mesh.get_all_groups()[::-1]
    return [DistState(rank=group.rank(), world_size=group.size(), group=group) for group in groups]
