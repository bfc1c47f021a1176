"""The random generators of a process: Python's, NumPy's, torch's for the host and for the device."""

from __future__ import annotations

import hashlib
import random
from typing import Any, cast

import numpy as np
import torch

from accel_fn._state import DistState


def random_state(device: torch.device) -> dict[str, Any]:
    """Where all of them stand, in plain data and tensors."""
    name, keys, position, has_gauss, gauss = cast("Any", np.random.get_state(legacy=True))
    version, words, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss_next],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_random(state: dict[str, Any], device: torch.device) -> None:
    """Put all of them back to where they stood."""
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def derive_random(state: DistState) -> None:
    """Seed all of them from (seed, rank, step): for a rank that the saved run did not have."""
    words = f"accel_fn {state.seed} {state.rank} {state.step}".encode()
    number = int.from_bytes(hashlib.sha256(words).digest()[:8], "big")
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number % 2**63)
