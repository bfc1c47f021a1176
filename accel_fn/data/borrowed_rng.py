"""Random generators that are others': borrowed for a while, and given back as they were."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from accel_fn.data.order import mix

_LOCK = threading.RLock()  # the global ones are the process's: one borrower at a time
os.register_at_fork(  # a worker must not be forked while another thread has borrowed them
    before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
)
_GLOBAL = (torch.default_generator, random, np.random)
_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def seed_process(seed: int) -> None:
    """Start the global generators anew: those of a worker, which nobody else shares."""
    for number, each in enumerate(_GLOBAL):
        _start(each, mix(seed + number))


class Generators:
    """States that the global generators, and some others, have inside and nobody sees outside.

    Entered again, they go on where they were left. The global ones are
    torch's for the CPU, Python's and NumPy's.
    """

    def __init__(self, seed: int, others: Sequence[Any] = ()) -> None:
        self._seed = seed
        self._all = (*_GLOBAL, *others)
        self._inside: list[Any] = []
        self._outside: list[Any] = []

    def __enter__(self) -> None:
        _LOCK.acquire()
        self._outside = [_state(each) for each in self._all]
        if self._inside:
            self._set_all(self._inside)
        else:
            for number, each in enumerate(self._all):
                _start(each, mix(self._seed + number))

    def __exit__(self, *_: object) -> None:
        self._inside = [_state(each) for each in self._all]
        self._set_all(self._outside)
        _LOCK.release()

    def _set_all(self, states: list[Any]) -> None:
        for each, state in zip(self._all, states, strict=True):
            _set_state(each, state)


def held_by(holder: Any) -> list[Any]:
    """The random generators among the attributes of an object."""
    return [each for each in getattr(holder, "__dict__", {}).values() if isinstance(each, _KINDS)]


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _start(generator: Any, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:  # NumPy's takes 32 bits
        generator.seed(seed & 0xFFFFFFFF)
