"""Host memory for tensors of a device: in blocks, pinned where copies then need no wait each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from accel_fn.checkpoint.format.shard_plan import Part

PAGEABLE = ("cpu", "mps")
"""Devices whose copies to pinned memory are no faster. Those of an accelerator need no wait."""
_BLOCK_BYTES, _ALIGNMENT = 2**28, 64
Buffers = dict[tuple[str, tuple[int, ...]], Tensor]
"""Host memory for the parts that this rank writes, kept from save to save."""


def new_buffers(parts: Sequence[Part], *, pinned: bool) -> Buffers:
    """Allocate buffers in blocks: torch rounds each allocation of pinned memory up to a power of two."""
    found: Buffers = {}
    for group in blocks_of(parts):
        sizes = [-(-part.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for part in group]
        block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        for part, own in zip(group, torch.split(block, sizes), strict=True):
            tensor = part.tensor
            values = own[: tensor.nbytes].view(tensor.dtype)
            found[part.name, part.offsets] = values.view(tensor.shape)
    return found


def blocks_of(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Group neighbours up to the size of a block."""
    group, size = list[Part](), 0
    for part in parts:
        if group and size + part.tensor.nbytes > _BLOCK_BYTES:
            yield group
            group, size = [], 0
        group.append(part)
        size += part.tensor.nbytes
    if group:
        yield group


def copied_to_host(parts: Sequence[Part]) -> Iterator[tuple[Part, Tensor]]:
    """Copy tensors to the host, block by block: it waits for an accelerator once a block."""
    for group in blocks_of(parts):
        moved = [part for part in group if part.tensor.device.type not in PAGEABLE]
        buffers = new_buffers(moved, pinned=True)
        for part in moved:
            buffers[part.name, part.offsets].copy_(part.tensor, non_blocking=True)
        for device in {part.tensor.device for part in moved}:
            torch.accelerator.synchronize(device)
        for part in group:
            yield part, buffers.get((part.name, part.offsets), part.tensor).cpu()
