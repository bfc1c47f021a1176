"""Estimate the memory of a training step without allocating it. The command `estimate` prints estimates."""

import importlib
from typing import Any

__all__ = ["MemoryEstimate", "estimate_memory"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.memory"), name)
