"""Estimate the memory of a training step without using it; the command `estimate` prints it."""

import importlib
from typing import Any

__all__ = ["MemoryEstimate", "estimate_memory"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.memory"), name)
