"""Files of plain data: tensors, numbers, strings and containers of them, and nothing that could run."""

from __future__ import annotations

import io
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch

from accel_fn.checkpoint.format.hashing import opened
from accel_fn.errors import ArgumentError, CheckpointError


def to_plain(values: Mapping[str, Any], function: str) -> bytes:
    """Make a file's content; refuse what could not be read back without running code."""
    buffer = io.BytesIO()
    try:
        torch.save(dict(values), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        names = list(values)
        if len(names) > 1:  # find the first that is at fault
            for name in names:
                to_plain({name: values[name]}, function)
        raise ArgumentError(
            f"{function}: {', '.join(names)} must hold tensors, numbers, strings and "
            f"containers of them, got something else; {_first_line(error)}"
        ) from None
    return buffer.getvalue()


def from_plain(path: Path, function: str) -> Any:
    with opened(path, function) as file, open(file, "rb", closefd=False) as stream:
        try:
            return torch.load(stream, weights_only=True, map_location="cpu")
        except Exception as error:
            raise CheckpointError(
                f"{function}: {path} must hold tensors and plain data, got something else; "
                f"{_first_line(error)}"
            ) from error


def dict_from_plain(path: Path, keys: Set[str], function: str) -> dict[str, Any]:
    """Read a file that holds a dict with at least these keys."""
    found = from_plain(path, function)
    if not isinstance(found, dict) or not keys <= found.keys():
        raise CheckpointError(f"{function}: {path} must hold {', '.join(sorted(keys))}")
    return found


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line]
    return (lines or str(error).splitlines() or [""])[0].strip()
