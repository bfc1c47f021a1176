"""Seed the random generators of the user's process temporarily, and restore them."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from accel_fn.data.order import mix

# Threads, and so simulated ranks, share the global generators. With this lock, they take turns.
GLOBAL_LOCK = threading.RLock()
# Hold the lock during a fork: otherwise a worker could start with states that another thread has
# set only temporarily.
os.register_at_fork(
    before=GLOBAL_LOCK.acquire,
    after_in_parent=GLOBAL_LOCK.release,
    after_in_child=GLOBAL_LOCK.release,
)
_GLOBAL = (torch.default_generator, random, np.random)
_NUM_BYTES = 625 * 4
_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def seed_process(seed: int) -> None:
    """Seed the global generators of a worker process, in which no other code uses them."""
    for number, each in enumerate(_GLOBAL):
        _seed(each, mix(seed + number))


class Generators:
    """A context that seeds the global generators and `others`, and restores them at its end.

    When the context is entered again, the generators continue from their last states in it. The
    global generators are torch's for the CPU, Python's and NumPy's.
    """

    def __init__(self, seed: int, others: Sequence[Any] = ()) -> None:
        self._seed = seed
        self._all = (*_GLOBAL, *others)
        self._inside: list[Any] = []
        self._outside: list[Any] = []

    def __enter__(self) -> None:
        GLOBAL_LOCK.acquire()
        self._outside = [_state(each) for each in self._all]
        if self._inside:
            self._set_all(self._inside)
        else:
            for number, each in enumerate(self._all):
                _seed(each, mix(self._seed + number))

    def __exit__(self, *_: object) -> None:
        self._inside = [_state(each) for each in self._all]
        self._set_all(self._outside)
        GLOBAL_LOCK.release()

    def _set_all(self, states: list[Any]) -> None:
        for each, state in zip(self._all, states, strict=True):
            _set_state(each, state)


def generators_of(holder: Any) -> list[Any]:
    """List the random generators among the attributes of an object."""
    return [each for each in getattr(holder, "__dict__", {}).values() if isinstance(each, _KINDS)]


@dataclass(frozen=True, slots=True)
class _Words:
    """The words of NumPy's global state, and the normal number that NumPy keeps for its next call.

    The words are read from NumPy's memory and, without a kept number, written to it: `get_state`
    and `set_state` take 100 us each, longer than reading a batch may take.
    """

    words: bytes
    kept: float | None

    @classmethod
    def taken(cls, memory: Any) -> _Words:
        """Read the state, and remove the kept normal number."""
        words = memory.raw
        number = np.random.standard_normal()
        # The words are unchanged, so `number` was not drawn: it is the kept one.
        if memory.raw == words:
            return cls(words, number)
        # NumPy drew a pair of normal numbers and keeps the second one. Remove it, and restore the
        # words.
        np.random.standard_normal()
        memory.raw = words
        return cls(words, None)

    def set_in(self, memory: Any) -> None:
        if self.kept is None:
            memory.raw = self.words
        else:
            words = np.frombuffer(self.words, np.uint32)
            np.random.set_state(("MT19937", words[:-1], int(words[-1]), 1, self.kept))


def _numpys_memory() -> Any:
    """Return the memory of NumPy's global generator (624 words and a position), or None."""
    # NumPy's type stub leaves this function out.
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(bits) is not np.random.MT19937:
        return None
    return (ctypes.c_char * _NUM_BYTES).from_address(bits.ctypes.state_address)


def _state(generator: Any) -> Any:
    if generator is np.random and (memory := _numpys_memory()) is not None:
        return _Words.taken(memory)
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(state, _Words):
        state.set_in(_numpys_memory())
    elif isinstance(generator, np.random.Generator):
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
    else:
        # NumPy's generator takes 32 bits.
        generator.seed(seed & 0xFFFFFFFF)
