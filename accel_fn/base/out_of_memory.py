"""Out of memory (OOM): recognise such errors, and free cached memory."""

from __future__ import annotations

import gc

import torch

from accel_fn.base.state import DistState

_PHRASES = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",  # a RuntimeError, not of its own allocator's class
)


def is_memory(error: Exception) -> bool:
    """Is this error out of memory? On a host torch has no class for it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        phrase in str(error) for phrase in _PHRASES
    )


def free_memory(state: DistState) -> None:
    """Collect garbage and empty the device's cache."""
    gc.collect()
    if state.device.type != "cpu":
        torch.accelerator.empty_cache()
