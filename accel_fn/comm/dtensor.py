"""Sharded tensors, of which a rank holds a part: that part, and what all parts come to.

They are torch's DTensors, known here by what they can do: importing that module takes time.
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
"""Told apart by their type, which is quicker."""


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Does a rank hold a part of this tensor only?"""
    return type(value) not in _WHOLE and hasattr(value, "to_local")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory."""
    if not is_sharded(tensor):
        return tensor
    return cast("DTensor", tensor.detach()).to_local()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. In shards, every rank calls it.

    Cost: for shards, one gather.
    """
    if not is_sharded(tensor) or tensor.device_mesh.size() == 1:
        return local(tensor).detach()
    return cast("DTensor", tensor.detach()).full_tensor()


def norm_over_shards(norm: Tensor, of: Sequence[Tensor]) -> Tensor:
    """The norm of whole tensors from that of what each rank holds of them.

    Cost: one collective of a number.
    """
    assert is_sharded(of[0])
    mesh = of[0].device_mesh
    total: Tensor = torch.linalg.vector_norm(gather_numbers(norm, mesh.get_group(mesh.ndim - 1)))
    return total


def fill(tensor: Tensor, whole: Tensor) -> None:
    """Overwrite a tensor by a whole one: in shards, this rank's part of it."""
    if is_sharded(tensor):
        group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
        parts, place = whole.chunk(group.size(), dim=0), group.rank()
        if place < len(parts):
            local(tensor).copy_(parts[place])
    else:
        tensor.copy_(whole)


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, cut as another one is."""
    cut = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
    fill(cut, value.detach())
    return cut


def place_of(tensor: Tensor) -> int:
    """Which part of a tensor this rank holds; 0 where that is all."""
    return axes_of(tensor)[0].rank if is_sharded(tensor) else 0


def axes_of(tensor: Tensor) -> list[DistState]:
    """The ranks that a tensor is spread over, by axis, the one that it is cut along first."""
    assert is_sharded(tensor)
    groups = tensor.device_mesh.get_all_groups()[::-1]
    return [DistState(rank=group.rank(), world_size=group.size(), group=group) for group in groups]
