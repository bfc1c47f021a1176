"""Random generators of the user's process, used for a while with states of our own, then restored."""

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
    """Seed the global generators: those of a worker, which has them alone."""
    for number, each in enumerate(_GLOBAL):
        _seed(each, mix(seed + number))


class Generators:
    """Inside, the global generators and `others` have states of their own; outside, they are as before.

    Entered again, they continue where they were left. The global ones are
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
                _seed(each, mix(self._seed + number))

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


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:  # NumPy's takes 32 bits
        generator.seed(seed & 0xFFFFFFFF)
