"""The bytes of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, [num_bytes], uint8, in the same memory.

    A tensor of at most one element is contiguous whatever its strides; `view` would keep them.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
