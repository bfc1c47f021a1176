"""Checkpoints of format 1 have functions by the names that these had then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {"num_samples": "count_samples", "average": "ema", "average.uniform": "swa"}


def renamed_manifest(body: bytes) -> bytes:
    """Write the new names into the manifest: those of functions, and of places of tensors."""
    for old, new in _NAMES.items():
        body = body.replace(f'"{old}"'.encode(), f'"{new}"'.encode())
        body = body.replace(f" {old}/".encode(), f" {new}/".encode())
    return body


def renamed_rest(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Write the new names into what a step saved beside tensors: places of transforms."""
    places = {place: place.rpartition(" ") for place in rest["transforms"]}
    new = {place: f"{at}{gap}{_NAMES.get(name, name)}" for place, (at, gap, name) in places.items()}
    return {**rest, "transforms": {new[at]: values for at, values in rest["transforms"].items()}}
