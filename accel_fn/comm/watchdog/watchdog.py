"""Watching a rank: which collective and which step it is in, and what becomes of one that waits in vain."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

from accel_fn.comm.watchdog.abort import Ending
from accel_fn.comm.watchdog.hang_report import (
    Collective,
    Place,
    Stack,
    list_ranks,
    place_of,
    shapes_of,
)
from accel_fn.comm.watchdog.store_log import Board, Entry
from accel_fn.errors import WorldError

_OF_GLOO, _TIMED_OUT = "gloo/transport", "Timed out waiting"
_LONGEST_PERIOD_S, _RANKS_PER_S = 0.5, 2000
_STDERR = 2
_ALARMED = "another rank has waited for too long"


class StoreWatchdog:
    """What one rank of a world is doing, as far as the others wait for it. Mutable; one per group.

    A thread looks at it a few times per timeout. Where a rank has waited for
    longer, it raises an alarm on the board, and every rank reports on itself
    and ends its process: a main thread that waits is deep in native code, and
    cannot raise. A rank that talked within half the timeout does not look at
    the board, so that a run that goes well asks it nothing.
    """

    def __init__(
        self,
        board: Board,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        libraries: Sequence[str],
    ) -> None:
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._libraries = tuple(libraries)
        self._period_s = max(min(_LONGEST_PERIOD_S, timeout_s / 8), world_size / _RANKS_PER_S)
        self._ending = Ending(board, rank, world_size, self._period_s)
        self._seen = time.monotonic()
        self._number = 0
        self._last: Collective | None = None
        self._step: tuple[int, Place | None] | None = None
        self._waits: dict[int, tuple[float, Collective]] = {}
        self._stopped = threading.Event()
        self._judging = threading.Lock()
        self._thread = threading.Thread(target=self._look, name="accel_fn watch", daemon=True)
        self._shows_crashes = False
        self.has_lost_rank = False
        """Has a collective found that a rank is gone?"""

    def start(self) -> None:
        """Begin to look."""
        if not faulthandler.is_enabled():  # backends end a process by abort(): say where it was
            faulthandler.enable(_STDERR)
            self._shows_crashes = True
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and leave word for those that stay. Harmless when stopped already."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._board.log(Entry(self._rank, f"has left{_why()}{self._history()}", left=True))
            if self._shows_crashes:
                faulthandler.disable()
        self._thread.join()

    def enter(self, function: str, leaves: Sequence[Any], *, counts: bool = True) -> Waiting:
        """Note that a collective of these begins: what this gives is entered to wait for it.

        A message between two ranks does not count: numbers are alike on all ranks.
        """
        place = place_of(sys._getframe(1), self._libraries)
        if not counts:
            return Waiting(self, Collective(0, function, shapes_of(leaves), place))
        self._seen = time.monotonic()
        self._number += 1
        self._last = Collective(self._number, function, shapes_of(leaves), place)
        return Waiting(self, self._last)

    def begin_wait(self, collective: Collective) -> None:
        """From now on this thread waits for the others."""
        self._waits[threading.get_ident()] = time.monotonic(), collective

    def end_wait(self) -> None:
        """All have come."""
        _, collective = self._waits.pop(threading.get_ident())
        if collective.number:
            self._seen = time.monotonic()

    def begin_step(self, number: int) -> None:
        """Note that a step begins."""
        self._seen = time.monotonic()
        self._step = number, place_of(sys._getframe(1), self._libraries)

    def diagnose(self, error: BaseException, function: str) -> None:
        """Report and end if an error says that time is up; raise ours if it says that a rank is gone."""
        text = str(error)
        if _OF_GLOO not in text:
            return
        with (
            self._judging
        ):  # else the thread would report where this is, and not where the error was
            if _TIMED_OUT in text:
                self._alarm(function, error)
            entries = self._ending.hear(self._explains, 0)
            if (
                self._board.is_alarmed()
            ):  # a connection is closed where the other end ran out of time
                self._end(_ALARMED, error)
        self.has_lost_rank = True
        entries[self._rank] = self._entry(Stack.of_error(error))
        ranks = list_ranks(entries, self._world_size) + self._board.absence()
        rule = "every rank must stay until all are through, got one that is gone"
        raise WorldError(f"{function}: {rule}\n{ranks.rstrip()}") from error

    def _explains(self, entries: Mapping[int, Entry]) -> bool:
        """Does this say why a connection was closed?"""
        return any(entry.left for entry in entries.values()) or self._board.is_alarmed()

    def _look(self) -> None:
        while not self._stopped.wait(self._period_s):
            with self._judging:
                self._look_once(time.monotonic())

    def _look_once(self, now: float) -> None:
        for since, collective in list(self._waits.values()):
            if now - since > self._timeout_s + self._period_s:
                self._alarm(collective.function)
        if now - self._seen > self._timeout_s / 2 and self._board.is_alarmed():
            self._end(_ALARMED)

    def _alarm(self, function: str, error: BaseException | None = None) -> NoReturn:
        self._board.raise_alarm()
        self._end(f"{function} has waited for longer than timeout_s={self._timeout_s:g}", error)

    def _end(self, reason: str, error: BaseException | None = None) -> NoReturn:
        main, here = threading.main_thread(), threading.current_thread()
        stacks = {}
        if error is not None:
            stacks[here.name] = Stack.of_error(error)
        if error is None or here is not main:
            stacks[main.name] = Stack.of_thread(sys._current_frames().get(main.ident or 0))
        mine = self._entry(next(iter(stacks.values())))
        shown = {name: stack.under(self._libraries) for name, stack in stacks.items()}
        self._ending.end(reason, shown, mine)

    def _entry(self, stack: Stack) -> Entry:
        """What this rank is doing, with such a stack."""
        for _, collective in list(self._waits.values()):
            return Entry(self._rank, f"in {collective}{self._history(stack, last=False)}")
        place = stack.place(self._libraries)
        return Entry(self._rank, f"at {place}{self._history(stack)}")

    def _history(self, stack: Stack | None = None, *, last: bool = True) -> str:
        """Its step, and the last collective that it has entered."""
        told = []
        if self._step is not None:
            number, place = self._step
            phase = stack.phase() if stack else ""
            told.append(
                f"in step {number}, {phase}" if phase else f"last step {number}, at {place}"
            )
        if last:
            told.append(f"last {self._last}" if self._last else "no collective")
        return "".join(f"; {each}" for each in told)


class Waiting:
    """A `with` over it is the time that a rank waits for a collective."""

    __slots__ = ("_collective", "_watch")

    def __init__(self, watch: StoreWatchdog, collective: Collective) -> None:
        self._watch = watch
        self._collective = collective

    def __enter__(self) -> None:
        self._watch.begin_wait(self._collective)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self._watch.diagnose(error, self._collective.function)
        finally:
            self._watch.end_wait()


def _why() -> str:
    """The error that this process ends with, where it does."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is None:
        return ""
    first = str(error).partition("\n")[0][:200]
    return f" by {type(error).__name__}" + (f": {first}" if first else "")
