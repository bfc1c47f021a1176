"""Warnings that point at the line of the user's program that called the library."""

from __future__ import annotations

import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path


def _folder(package: str) -> str:
    """Return a package's folder without importing it: commands that read logs run without torch."""
    found = find_spec(package)
    return "" if found is None or found.origin is None else f"{Path(found.origin).parent}{os.sep}"


LIBRARIES = tuple(filter(None, map(_folder, ("accel_fn", "torch"))))


def warn_user(text: str) -> None:
    """Warn at the innermost line that is neither the library's nor torch's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
