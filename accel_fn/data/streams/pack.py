"""Pack items of a stream into one block of bytes, for another process or rank."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


def pack(items: list[Any]) -> Tensor:
    """Picklable items as bytes: [num_bytes], uint8.

    One block is one piece of shared memory, where torch would open a file for
    every tensor; and of a view it holds the part that is seen, where a plain
    pickle holds all that lies behind.
    """
    room = io.BytesIO()
    _Pickler(room, protocol=5).dump(items)
    return torch.frombuffer(room.getbuffer(), dtype=torch.uint8)


def unpack(block: Tensor | bytes) -> list[Any]:
    """Restore the items that `pack` got, from its bytes; they share no memory."""
    data: Any = block.numpy() if isinstance(block, Tensor) else block
    return pickle.loads(memoryview(data))  # type: ignore[no-any-return]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        flat = value.contiguous().reshape(-1)
        return _restored, (flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))


def _is_plain(tensor: Tensor) -> bool:
    """Does the tensor hold plain numbers in host memory? Torch itself pickles all others."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _restored(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape)
