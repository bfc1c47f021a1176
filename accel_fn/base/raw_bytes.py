"""What a tensor holds, as bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> Tensor:
    """Those of a contiguous tensor, [num_bytes], uint8, in the same memory.

    A tensor of one element or none is contiguous whatever its strides, which `view` would keep.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
