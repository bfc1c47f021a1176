"""The watchdog: records which step and collective a rank is in, and aborts the world if ranks hang."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

from accel_fn.comm.watchdog.abort import Abort
from accel_fn.comm.watchdog.hang_report import (
    Collective,
    Place,
    Stack,
    is_compiling,
    list_ranks,
    place_of,
    shapes_of,
)
from accel_fn.comm.watchdog.store_log import Entry, StoreLog
from accel_fn.errors import WorldError

_OF_GLOO, _TIMED_OUT = "gloo/transport", "Timed out waiting"
_LONGEST_PERIOD_S, _RANKS_PER_S = 0.5, 2000
_STDERR = 2
_ABORTED = "another rank has waited for too long"


class StoreWatchdog:
    """The flight recorder and the watchdog of one rank. Mutable; one per group.

    A thread looks a few times per timeout. If this rank has waited for longer, it requests an
    abort in the store log, and every rank prints a report and ends its process: a main thread
    that waits in native code cannot raise. A rank that entered a collective within half the
    timeout does not read the store, so a healthy run costs no traffic.
    """

    def __init__(
        self,
        log: StoreLog,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        libraries: Sequence[str],
        times_steps: bool = False,
    ) -> None:
        self._log = log
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._libraries = tuple(libraries)
        self._period_s = max(min(_LONGEST_PERIOD_S, timeout_s / 8), world_size / _RANKS_PER_S)
        self._abort = Abort(log, rank, world_size, self._period_s)
        self._seen = time.monotonic()
        self._number = 0
        self._last: Collective | None = None
        self._step: tuple[str, Place | None] | None = None
        self._waits: dict[int, tuple[float, Collective]] = {}
        self._times_steps = times_steps
        """Does a step that outlasts the timeout hang? The host does not wait for a device's collectives."""
        self._step_began: float | None = None
        self._stopped = threading.Event()
        self._diagnosing = threading.Lock()
        self._thread = threading.Thread(target=self._look, name="accel_fn watchdog", daemon=True)
        self._shows_crashes = False
        self.has_lost_rank = False
        """Has a collective failed because a rank is gone?"""

    def start(self) -> None:
        """Start the thread."""
        if not faulthandler.is_enabled():  # backends end a process by abort(): show where it was
            faulthandler.enable(_STDERR)
            self._shows_crashes = True
        self._thread.start()

    def stop(self) -> None:
        """End the thread and add a last entry for the peers. Does nothing the second time."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._log.add(Entry(self._rank, f"has left{_reason()}{self._history()}", left=True))
            if self._shows_crashes:
                faulthandler.disable()
        self._thread.join()

    def enter(self, function: str, leaves: Sequence[Any], *, counts: bool = True) -> Waiting:
        """Record that a collective of these leaves begins; enter the result to wait for it.

        A message between two ranks is not counted: numbers are alike on all ranks.
        """
        place = place_of(sys._getframe(1), self._libraries)
        if not counts:
            return Waiting(self, Collective(0, function, shapes_of(leaves), place))
        self._seen = time.monotonic()
        self._number += 1
        self._last = Collective(self._number, function, shapes_of(leaves), place)
        return Waiting(self, self._last)

    def begin_wait(self, collective: Collective) -> None:
        """Record that this thread waits from now on."""
        self._waits[threading.get_ident()] = time.monotonic(), collective

    def end_wait(self) -> None:
        """Record that the collective is complete."""
        _, collective = self._waits.pop(threading.get_ident())
        if collective.number:
            self._seen = time.monotonic()

    def begin_step(self, name: str) -> None:
        """Record that a step begins."""
        self._seen = time.monotonic()
        self._step = name, place_of(sys._getframe(1), self._libraries)
        self._step_began = self._seen if self._times_steps else None

    def end_step(self) -> None:
        """Record that the step has returned or raised."""
        self._step_began = None

    def diagnose(self, error: BaseException, function: str) -> None:
        """Abort if a Gloo error is a time-out; raise a WorldError if it means that a rank is gone."""
        text = str(error)
        if _OF_GLOO not in text:
            return
        # Else the thread would report where this is, and not where the error was.
        with self._diagnosing:
            if _TIMED_OUT in text:
                self._request_abort(function, error)
            entries = self._abort.wait_for_entries(self._explains, 0)
            if self._log.is_abort_requested():  # peers close connections when they abort
                self._end(_ABORTED, error)
        self.has_lost_rank = True
        entries[self._rank] = self._entry(Stack.of_error(error))
        ranks = list_ranks(entries, self._world_size) + self._log.missing_server()
        rule = "every rank must stay until all have finished, got one that is gone"
        raise WorldError(f"{function}: {rule}\n{ranks.rstrip()}") from error

    def _explains(self, entries: Mapping[int, Entry]) -> bool:
        """Do these entries explain why a connection was closed?"""
        return any(entry.left for entry in entries.values()) or self._log.is_abort_requested()

    def _look(self) -> None:
        while not self._stopped.wait(self._period_s):
            with self._diagnosing:
                self._look_once(time.monotonic())

    def _look_once(self, now: float) -> None:
        for since, collective in list(self._waits.values()):
            if now - since > self._timeout_s + self._period_s:
                self._request_abort(collective.function)
        began = self._step_began
        # A compiler may take longer than any collective.
        if began and now - began > self._timeout_s + self._period_s and not is_compiling():
            self._request_abort("step")
        if now - self._seen > self._timeout_s / 2 and self._log.is_abort_requested():
            self._end(_ABORTED)

    def _request_abort(self, function: str, error: BaseException | None = None) -> NoReturn:
        self._log.request_abort()
        self._end(f"{function} has waited for longer than timeout_s={self._timeout_s:g}", error)

    def _end(self, reason: str, error: BaseException | None = None) -> NoReturn:
        main, here = threading.main_thread(), threading.current_thread()
        stacks = {}
        if error is not None:
            stacks[here.name] = Stack.of_error(error)
        if error is None or here is not main:
            stacks[main.name] = Stack.of_thread(sys._current_frames().get(main.ident or 0))
        entry = self._entry(next(iter(stacks.values())))
        shown = {name: stack.under(self._libraries) for name, stack in stacks.items()}
        self._abort.run(reason, shown, entry)

    def _entry(self, stack: Stack) -> Entry:
        """Return what this rank is doing, with such a stack."""
        for _, collective in list(self._waits.values()):
            return Entry(self._rank, f"in {collective}{self._history(stack, last=False)}")
        place = stack.place(self._libraries)
        return Entry(self._rank, f"at {place}{self._history(stack)}")

    def _history(self, stack: Stack | None = None, *, last: bool = True) -> str:
        """Return its step, and the last collective that it entered."""
        shown = []
        if self._step is not None:
            name, place = self._step
            phase = stack.phase() if stack else ""
            shown.append(f"in step {name}, {phase}" if phase else f"last step {name}, at {place}")
        if last:
            shown.append(f"last {self._last}" if self._last else "no collective")
        return "".join(f"; {each}" for each in shown)


class Waiting:
    """A context: the time that a rank waits for a collective."""

    __slots__ = ("_collective", "_watchdog")

    def __init__(self, watchdog: StoreWatchdog, collective: Collective) -> None:
        self._watchdog = watchdog
        self._collective = collective

    def __enter__(self) -> None:
        self._watchdog.begin_wait(self._collective)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self._watchdog.diagnose(error, self._collective.function)
        finally:
            self._watchdog.end_wait()


def ending_error() -> BaseException | None:
    """Return the error that this process ends with, if any."""
    return sys.exc_info()[1] or getattr(sys, "last_value", None)


def _reason() -> str:
    error = ending_error()
    if error is None:
        return ""
    first = str(error).partition("\n")[0][:200]
    return f" by {type(error).__name__}" + (f": {first}" if first else "")
