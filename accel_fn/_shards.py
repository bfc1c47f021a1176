"""Sharded tensors, of which a rank holds a part: that part, and what all parts come to.

They are torch's DTensors, known here by what they can do: importing that module takes time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor

from accel_fn._comm import gather_numbers

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Does a rank hold a part of this tensor only?"""
    return hasattr(value, "to_local")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory."""
    if not is_sharded(tensor):
        return tensor
    return cast("DTensor", tensor.detach()).to_local()


def norm_over_shards(norm: Tensor, of: Sequence[Tensor]) -> Tensor:
    """The norm of whole tensors from that of what each rank holds of them.

    Cost: one collective of a number.
    """
    assert is_sharded(of[0])
    mesh = of[0].device_mesh
    total: Tensor = torch.linalg.vector_norm(gather_numbers(norm, mesh.get_group(mesh.ndim - 1)))
    return total


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, cut as another one is."""
    assert is_sharded(like)
    group = like.device_mesh.get_group(like.device_mesh.ndim - 1)
    parts, place = value.detach().chunk(group.size(), dim=0), group.rank()
    cut = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
    if place < len(parts):
        local(cut).copy_(parts[place])
    return cut
