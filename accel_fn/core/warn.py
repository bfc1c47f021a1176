"""Warnings at the line of the user's program that called the library."""

from __future__ import annotations

import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

_TORCH = find_spec("torch")  # not imported: a command that reads logs warns without it
assert _TORCH is not None
assert _TORCH.origin is not None
LIBRARIES = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(_TORCH.origin).parent}{os.sep}")


def warn_user(text: str) -> None:
    """Warn at the innermost line that is neither the library's nor torch's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
