"""Out of memory (OOM): recognise such errors, and free cached memory."""

from __future__ import annotations

import gc

import torch

from accel_fn.base.state import DistState

_PHRASES = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    # RuntimeErrors of libraries that allocate beside torch; the second is cuBLAS without memory to begin.
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
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
