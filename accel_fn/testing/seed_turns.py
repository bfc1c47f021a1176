"""Make simulated ranks, which are threads, take turns at torch's global random generator."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup

_POLL_S, _LONGEST_TURN_S = 0.0005, 2.0


class _Turn:
    """A rank's turn at the generator: from `manual_seed` to its next collective, or to the rank's end."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._count = _num_collectives(group)
        # A rank may wait for a peer without a collective, so its turn also ends after some time.
        self._until = time.monotonic() + _LONGEST_TURN_S

    def lasts(self) -> bool:
        """Return whether the rank may still draw: no time-out, and no collective since its seed."""
        return time.monotonic() < self._until and _num_collectives(self._group) == self._count


class _Rank(threading.local):
    """The simulated rank that this thread runs, if any, and the current turn of any rank."""

    process: int | None = None
    """The process in which the thread runs the rank. A forked process, such as a loader's worker,
    has a copy of this object, but runs no rank."""
    group: ProcessGroup | None = None
    turn: _Turn | None = None
    lock = threading.Lock()
    # The list has at most one turn, and all threads share it.
    turns: ClassVar[list[_Turn]] = []


_rank = _Rank()
_seed = torch.manual_seed


def _num_collectives(group: ProcessGroup) -> int:
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def _seed_in_turn(seed: Any) -> torch.Generator:
    """Seed as torch does; in a simulated rank, wait until the turn of another rank is over."""
    if _rank.group is not None and _rank.process == os.getpid():
        end_turn()
        while True:
            with _rank.lock:
                if not any(turn.lasts() for turn in _rank.turns):
                    _rank.turn = _Turn(_rank.group)
                    _rank.turns[:] = [_rank.turn]
                    break
            time.sleep(_POLL_S)
    return _seed(seed)


def end_turn() -> None:
    """End this thread's turn, so that other ranks can seed; do nothing if it has no turn."""
    if _rank.turn is not None:
        with _rank.lock:
            if _rank.turn in _rank.turns:
                _rank.turns.remove(_rank.turn)
        _rank.turn = None


@contextmanager
def rank_of(group: ProcessGroup | None) -> Iterator[None]:
    """Make this thread a rank inside the context: `torch.manual_seed` then waits for the rank's turn."""
    torch.manual_seed = torch.random.manual_seed = _seed_in_turn
    # torch 2.13 sets `torch.compiler.is_compiling()` for the whole process while one thread
    # compiles. An optimizer that updates in another thread would then count its steps in float32.
    # So replace the context that sets it.
    if hasattr(torch.compiler, "_compile_session_context"):
        torch.compiler._compile_session_context = nullcontext  # type: ignore[assignment]
    _rank.group, _rank.process = group, os.getpid()
    try:
        yield
    finally:
        end_turn()
        _rank.group = None
