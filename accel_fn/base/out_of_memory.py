"""Memory that has run out: how an error says so, and what can be given back."""

from __future__ import annotations

import gc

import torch

from accel_fn.base.state import DistState

_WORDS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",  # torch says it in a RuntimeError, beside its own allocator's class
)


def is_memory(error: Exception) -> bool:
    """Is it that memory has run out? On a host torch has no class of error for that."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in str(error) for words in _WORDS
    )


def free_memory(state: DistState) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if state.device.type != "cpu":
        torch.accelerator.empty_cache()
