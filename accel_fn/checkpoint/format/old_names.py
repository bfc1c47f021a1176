"""Checkpoints of format 1 have functions by the names that these had then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_IN_MANIFEST = {
    b'"num_samples"': b'"count_samples"',
    b'"num_labels(': b'"count_labels(',
    b'"average"': b'"ema"',
    b'"average.uniform': b'"swa',
    b" average/": b" ema/",
}


def renamed_manifest(body: bytes) -> bytes:
    """Write the new names into a manifest; one of format 2 has none of the old ones."""
    if b'"format": 1,' not in body[:20]:
        return body
    for old, new in _IN_MANIFEST.items():
        body = body.replace(old, new)
    return body


def renamed_rest(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Write the new names into what a step saved beside tensors: places of transforms."""
    transforms = {
        place.removesuffix("average") + "ema" if place.endswith(" average") else place: values
        for place, values in rest["transforms"].items()
    }
    return {**rest, "transforms": transforms}
