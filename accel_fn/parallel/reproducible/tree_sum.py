"""Sums in the order of a binary tree: of lists of tensors as they arrive, and over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from accel_fn.core import primitives
from accel_fn.core.state import DistState

Tensors = Sequence[Tensor | None]
"""Terms of a sum. None adds nothing: the other term keeps its bits."""

_NOTHING = -0.0
"""A zero that changes no number when it is added: adding 0.0 would turn -0.0 into 0.0."""
_BUCKET_BYTES = 2**25


class Tree:
    """Adds up 2**n lists as a binary tree: the sum of the first half plus that of the second half.

    The tree holds at most one partial sum of each size, so it takes the memory of n + 1 lists.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, Tensors]] = []

    def add(self, tensors: Tensors) -> None:
        """Add the next list of tensors. The tree may overwrite these tensors from now on."""
        size = 1
        while self._sums and self._sums[-1][0] == size:
            tensors = _added(self._sums.pop()[1], tensors)
            size *= 2
        self._sums.append((size, tensors))

    def total(self) -> Tensors:
        """Return the sum, after all lists were added."""
        ((_, tensors),) = self._sums
        return tensors


def _added(left: Tensors, right: Tensors) -> Tensors:
    """Add two lists of tensors, in the memory of the left one; None counts as 0."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def sum_over_ranks(tensors: Tensors, like: Sequence[Tensor], state: DistState) -> Tensors:
    """Sum over the ranks, a power of two, in tree order, in the memory of the tensors.

    Every rank adds up one part of all ranks' tensors and sends the result to the others. So a rank
    sends as much as in an all-reduce. The offset of a tensor in the buffer does not depend on the
    number of ranks. It may affect the kernels that read the tensor.

    Args:
        tensors: this rank's tensors; None if it has none.
        like: tensors of the shapes, dtypes and layouts that `tensors` have, or would have.
        state: the state of this rank.

    Returns:
        The sums; None if no rank has a tensor.

    Cost: for each 32 MB, two collectives, and one write and one read of the data.
    """
    if state.world_size == 1:
        return tensors
    there = torch.ones(len(tensors), device=like[0].device)
    for index, tensor in enumerate(tensors):
        if tensor is None:
            there[index] = 0.0
    filled = [
        torch.full_like(each, _NOTHING) if tensor is None else tensor
        for tensor, each in zip(tensors, like, strict=True)
    ]
    for bucket in _buckets([there, *filled]):
        _sum_bucket(bucket, state)
    return [
        each if tensor is not None or there[index] else None
        for index, (tensor, each) in enumerate(zip(tensors, filled, strict=True))
    ]


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors of one dtype and device, up to a size that is cheap to copy."""
    for kind in dict.fromkeys((each.dtype, each.device) for each in tensors):
        bucket, size = list[Tensor](), 0
        for tensor in tensors:
            if (tensor.dtype, tensor.device) == kind:
                bucket.append(tensor)
                size += tensor.nbytes
                if size >= _BUCKET_BYTES:
                    yield bucket
                    bucket, size = [], 0
        if bucket:
            yield bucket


def _sum_bucket(bucket: Sequence[Tensor], state: DistState) -> None:
    """Replace tensors of one kind by their sums over the ranks."""
    sizes = [tensor.numel() for tensor in bucket]
    lacking = -sum(sizes) % state.world_size
    # Send bytes: not every backend supports every dtype, and these collectives do not compute sums.
    mine = _sum_part(bucket, lacking, state).view(torch.uint8)
    whole = torch.cat(primitives.all_gather(mine, state, "step")).view(bucket[0].dtype)
    for tensor, part in zip(bucket, torch.split(whole, [*sizes, lacking]), strict=False):
        tensor.copy_(part.view(tensor.shape))


def _sum_part(bucket: Sequence[Tensor], lacking: int, state: DistState) -> Tensor:
    """Return this rank's part of the sums; all ranks' parts have the same size."""
    flat = torch.cat([*[tensor.reshape(-1) for tensor in bucket], bucket[0].new_zeros(lacking)])
    rows = primitives.all_to_all(flat.view(torch.uint8), state, "step").view(state.world_size, -1)
    rows = rows.view(flat.dtype)
    del flat
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]
