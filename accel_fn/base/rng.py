"""The random generators of a process: Python's, NumPy's, torch's for the host and for the device."""

from __future__ import annotations

import ctypes
import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

from accel_fn.base.state import DistState

GENERATORS = threading.RLock()
"""Held by whoever seeds them and puts them back: simulated ranks are threads that share them."""


def random_state(device: torch.device) -> dict[str, Any]:
    """Where all of them stand, in plain data and tensors."""
    name, keys, position, has_gauss, gauss = cast("Any", np.random.get_state(legacy=True))
    version, words, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.from_numpy(np.array(words)), gauss_next],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_random(state: dict[str, Any], device: torch.device) -> None:
    """Put all of them back to where they stood."""
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(np.asarray(words).tolist()), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


@contextmanager
def kept_random(device: torch.device) -> Iterator[None]:
    """Inside, all of them may be seeded; afterwards they are where they were."""
    with GENERATORS:
        state = random_state(device)
        try:
            yield
        finally:
            restore_random(state, device)


def derive_random(state: DistState) -> None:
    """Seed all of them from (seed, rank, step): for a rank that the saved run did not have."""
    _seed(f"accel_fn {state.seed} {state.rank} {state.step}", state.device)


def key_random(state: DistState, slot: int) -> None:
    """Seed all of them from (seed, step, slot): for a part of the batch, whichever rank has it."""
    _seed(f"accel_fn {state.seed} {state.step} slot {slot}", state.device)


Standing = tuple[Any, dict[str, Any]]
"""Where Python's generator stands, and NumPy's, as they tell it."""


class Draws:
    """Tells whether Python's and NumPy's generators are drawn from; cheap where they are not.

    NumPy takes a tenth of a millisecond to tell where it stands: it is asked where its memory has changed.
    """

    def __init__(self) -> None:
        self._memory: bytes | None = None
        self._numpy: dict[str, Any] = {}

    def now(self) -> Standing:
        """Where they stand: what NumPy told is the same object where nobody has drawn since."""
        memory = _numpy_memory()
        if (
            memory is None or memory != self._memory or self._numpy["has_gauss"]
        ):  # it is not in there
            self._memory, self._numpy = memory, numpy_state()
        return random.getstate(), self._numpy

    def since(self, before: Standing) -> bool:
        """May anybody have drawn since they stood there?"""
        python, numpy = self.now()
        return python != before[0] or numpy is not before[1]


def numpy_state() -> dict[str, Any]:
    """Where NumPy's stands, of whatever kind it is."""
    return np.random.get_state(legacy=False)


def _numpy_memory() -> bytes | None:
    """What NumPy's generator holds but for a normal number in store; None where it is of another kind."""
    generator = np.random.mtrand.get_bit_generator()
    if not isinstance(generator, np.random.MT19937):
        return None
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)  # 624 words and a position


@contextmanager
def drawn_again(standing: Standing) -> Iterator[None]:
    """Inside, Python's and NumPy's generators stand there; afterwards they are where they were."""
    now = random.getstate(), numpy_state()
    _stand(standing)
    try:
        yield
    finally:
        _stand(now)


def _stand(standing: Standing) -> None:
    python, numpy = standing
    random.setstate(python)
    np.random.set_state(numpy)


def _seed(words: str, device: torch.device) -> None:
    number = int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big")
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number % 2**63)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number % 2**63)
