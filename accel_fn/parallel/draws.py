"""Seeds for ranks with the same rows and equal generators, whose draws must still differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def seed_at(state: Tensor, rank: int) -> int:
    """Return a seed that differs between ranks whose generators have the same state."""
    # Hash the state instead of drawing a seed: the host would wait for a number on a device.
    key = state.numpy().tobytes() + str(rank).encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % 2**63


def generator_of(device: torch.device) -> torch.Generator:
    """Return torch's default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    generators: Sequence[torch.Generator] = torch.get_device_module(device).default_generators
    return generators[device.index]
