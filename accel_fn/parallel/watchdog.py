"""The watchdog: records each rank's step and collective, and aborts the world if ranks hang.

Ranks that hang cannot use collectives, so they write their current work to the store of the
rendezvous.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from accel_fn.errors import WorldError
from accel_fn.parallel.hang_report import (
    CodeLine,
    Collective,
    Entry,
    Ranks,
    Stack,
    is_compiling,
    place_of,
    shapes_of,
)

T = TypeVar("T")

EXIT_CODE = 124
"""The exit code of a process whose world timed out, as for `timeout` in coreutils."""

_OF_GLOO = "gloo/transport"
_TIMED_OUT = re.compile("Timed out waiting|Application timeout")
"""Matches Gloo's error for a time-out, and its error for other collectives on the connection that
the time-out closed."""
_ABORTED = "another rank has waited for too long"
_STDERR = 2
_LONGEST_PERIOD_S, _READS_PER_S = 0.5, 2000
"""One process serves the store to all ranks: the larger the world, the less often each rank reads it."""

_SLACK_S, _LINGER_S, _POLL_S = 1.0, 0.3, 0.05
_ANSWER_S = 5.0
_LOG, _ABORT, _REPORTS = "accel_fn/log", "accel_fn/abort", "accel_fn/reports"


class StoreLog:
    """The entries of all ranks in the store, a request to abort, and a count of reports.

    If the server of the store is gone, calls return at once and do nothing.
    """

    def __init__(self, store: Any, address: tuple[str, int] | None) -> None:
        # Clone the store: if a rendezvous waits in the original store, other calls on it wait too.
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=_ANSWER_S))
        self._address = address

    def add(self, entry: Entry) -> None:
        """Append an entry."""
        self._call(lambda store: store.append(_LOG, json.dumps(asdict(entry)) + "\n"), None)

    def entries(self) -> dict[int, Entry]:
        """Return the latest entry of every rank that has one."""

        def read(store: Any) -> Any:
            return store.get(_LOG) if store.check([_LOG]) else b""

        lines = self._call(read, b"").decode().splitlines()
        found = [Entry(**json.loads(line)) for line in lines]
        return {entry.rank: entry for entry in found}

    def request_abort(self) -> None:
        """Request that every rank report and abort."""
        self._call(lambda store: store.add(_ABORT, 1), 0)

    def is_abort_requested(self) -> bool:
        """Return whether a rank has requested an abort."""
        return self._call(lambda store: store.check([_ABORT]), False)

    def count_reports(self, more: int = 0) -> int:
        """Add `more` to the number of ranks that have reported, and return the sum."""
        return self._call(lambda store: store.add(_REPORTS, more), 0)

    def is_served(self) -> bool:
        """Return whether the server accepts connections."""
        # Try a plain connection first: if no server answers, torch's client prints pages of native
        # frames.
        if self._address is None:
            return True
        try:
            with closing(socket.create_connection(self._address, _ANSWER_S)):
                return True
        except OSError:
            return False

    def missing_server(self) -> str:
        """Return a line for a report if the server is gone, else an empty text."""
        if self.is_served() or self._address is None:
            return ""
        host, port = self._address
        return f"  no store answers at {host}:{port}: rank 0, or the launcher that served it, has left\n"

    def _call(self, function: Callable[[Any], T], otherwise: T) -> T:
        if not self.is_served():
            return otherwise
        try:
            return function(self._store)
        except RuntimeError:
            return otherwise


class StoreWatchdog:
    """The flight recorder and the watchdog of one rank. Each group has its own.

    A thread checks several times per time-out. If this rank has waited longer than the time-out,
    the thread requests an abort through the store, and every rank prints a report and ends its
    process. A rank that made progress within half the time-out does not read the store, so a
    healthy run causes no traffic.
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
        mesh: Mapping[str, int] | None = None,
    ) -> None:
        self._log = log
        self._rank = rank
        self._ranks = Ranks(world_size, mesh or {})
        self._timeout_s = timeout_s
        self._libraries = tuple(libraries)
        self._period_s = max(min(_LONGEST_PERIOD_S, timeout_s / 8), world_size / _READS_PER_S)
        self.progress_at = time.monotonic()
        self._numbers: dict[str, int] = {}
        self._last: Collective | None = None
        self._step: tuple[str, CodeLine | None] | None = None
        self.waits: dict[int, tuple[float, Collective]] = {}
        # The host does not wait for collectives on a device, so the only sign of a hang is a step
        # that takes too long.
        self._times_steps = times_steps
        self._step_began: float | None = None
        self._stopped = threading.Event()
        self._diagnosing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="accel_fn watchdog", daemon=True)
        self._shows_crashes = False
        self.has_lost_rank = False
        """Whether a collective has failed because a rank is gone."""

    def start(self) -> None:
        """Start the thread."""
        # Backends end a process by abort(), for which Python prints no traceback by default.
        if not faulthandler.is_enabled():
            faulthandler.enable(_STDERR)
            self._shows_crashes = True
        self._thread.start()

    def stop(self) -> None:
        """End the thread and add a last entry for the peers. A second call is a no-op."""
        if not self._stopped.is_set():
            self._stopped.set()
            # This entry explains to a waiting peer why this rank closed its connection.
            self._log.add(Entry(self._rank, f"has left{_reason()}{self._history()}", left=True))
            if self._shows_crashes:
                faulthandler.disable()
        self._thread.join()

    def enter(
        self, function: str, leaves: Sequence[Any], *, counts: bool = True, axis: str = ""
    ) -> Waiting:
        """Record a collective of these leaves; return the context in which the caller waits for it."""
        place = place_of(sys._getframe(1), self._libraries)
        # Give messages the number 0: all ranks run equally many collectives, but may send different
        # numbers of messages.
        if not counts:
            return Waiting(self, Collective(0, function, axis, shapes_of(leaves), place))
        self.progress_at = time.monotonic()
        # Count separately along each axis: two ranks along one axis may run different numbers of
        # collectives along another axis.
        number = self._numbers.get(axis, 0) + 1
        self._numbers[axis] = number
        self._last = Collective(number, function, axis, shapes_of(leaves), place)
        return Waiting(self, self._last)

    def begin_step(self, name: str) -> None:
        """Record that a step begins."""
        self.progress_at = time.monotonic()
        self._step = name, place_of(sys._getframe(1), self._libraries)
        self._step_began = self.progress_at if self._times_steps else None

    def end_step(self) -> None:
        """Record that the step has returned or raised."""
        self._step_began = None

    def diagnose(self, error: BaseException, function: str, axis: str = "") -> None:
        """Abort if a Gloo error is a time-out; raise a WorldError if it means that a rank is gone."""
        text = str(error)
        has_timed_out = bool(_TIMED_OUT.search(text))
        if _OF_GLOO not in text and not has_timed_out:
            return
        peers = self._ranks.along(axis, self._rank)
        # Without the lock, the watchdog's thread could report this line instead of the line whose
        # collective failed.
        with self._diagnosing:
            if has_timed_out:
                self._request_abort(function, axis, error)
            # The log may explain a closed connection by the entry of a peer that left, or by a request
            # to abort. Wait for one of them.
            entries = self._wait_for_entries(
                lambda found: (
                    any(each.left for rank, each in found.items() if rank in peers)
                    or self._log.is_abort_requested()
                ),
                0,
            )
            # Ranks that abort close their connections, so an abort may be the cause of this error.
            if self._log.is_abort_requested():
                self._end(_ABORTED, error)
        self.has_lost_rank = True
        entries[self._rank] = self._entry(Stack.of_error(error))
        # Leave out ranks outside of the axis: they do not run this collective, so a missing entry
        # of theirs means nothing.
        ranks = self._ranks.list_work(entries, peers) + self._log.missing_server()
        along = f" along {axis}" if axis else ""
        rule = f"every rank{along} must stay until all have finished, got one that is gone"
        raise WorldError(f"{function}: {rule}\n{ranks.rstrip()}") from error

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            with self._diagnosing:
                self._check(time.monotonic())

    def _check(self, now: float) -> None:
        # Wait a period longer than the time-out, so that Gloo raises first: Gloo's error has the
        # stack of the thread that waits.
        longest = self._timeout_s + self._period_s
        for since, collective in list(self.waits.values()):
            if now - since > longest:
                self._request_abort(collective.function, collective.axis)
        began = self._step_began
        # Do not abort while the compiler runs: it may take longer than any collective.
        if began and now - began > longest and not is_compiling():
            self._request_abort("step")
        if now - self.progress_at > self._timeout_s / 2 and self._log.is_abort_requested():
            self._end(_ABORTED)

    def _request_abort(
        self, function: str, axis: str = "", error: BaseException | None = None
    ) -> NoReturn:
        self._log.request_abort()
        peers = self._ranks.along(axis, self._rank)
        along = f" along {axis} on {self._ranks.name(peers)}" if axis else ""
        self._end(
            f"{function}{along} has waited for longer than timeout_s={self._timeout_s:g}", error
        )

    def _end(self, reason: str, error: BaseException | None = None) -> NoReturn:
        """Write a report to stderr, wait for the peers' reports, and end this process."""
        main, here = threading.main_thread(), threading.current_thread()
        stacks = {}
        if error is not None:
            stacks[here.name] = Stack.of_error(error)
        if error is None or here is not main:
            stacks[main.name] = Stack.of_thread(sys._current_frames().get(main.ident or 0))
        entry = self._entry(next(iter(stacks.values())))
        try:
            self._log.add(entry)
            entries = self._wait_for_entries(
                lambda found: len(found) == self._ranks.world_size, self._period_s
            )
            _write(self._report(reason, {**entries, self._rank: entry}, stacks))
            # A launcher stops all ranks as soon as one ends, which would cut off the reports of the
            # other ranks.
            self._wait_for_reports(sum(not each.left for each in entries.values()))
        finally:
            # Exit directly: the main thread may wait in native code, which no exception interrupts.
            os._exit(EXIT_CODE)

    def _wait_for_entries(
        self, is_enough: Callable[[Mapping[int, Entry]], bool], notice_s: float
    ) -> dict[int, Entry]:
        """Return the log's entries once `is_enough` accepts them, a time-out ends or the store is gone."""
        deadline = time.monotonic() + notice_s + _SLACK_S
        while True:
            entries = self._log.entries()
            if is_enough(entries) or time.monotonic() > deadline or not self._log.is_served():
                return entries
            time.sleep(_POLL_S)

    def _report(
        self, reason: str, entries: Mapping[int, Entry], stacks: Mapping[str, Stack]
    ) -> str:
        world_size, process = self._ranks.world_size, f"{socket.gethostname()}, pid {os.getpid()}"
        rank = f"{self._ranks.name([self._rank])} of {world_size} ({process})"
        shown = [
            f"{name}, innermost call last:\n{stack.under(self._libraries)}"
            for name, stack in stacks.items()
        ]
        head = f"accel_fn: {rank} ends with exit code {EXIT_CODE}: {reason}\n"
        ranks = self._ranks.list_work(entries, range(world_size))
        return "".join([head, ranks, self._log.missing_server(), *shown])

    def _wait_for_reports(self, num_ranks: int) -> None:
        """Wait until `num_ranks` ranks have reported, including this one, or until a time-out."""
        deadline = time.monotonic() + self._period_s + _SLACK_S
        num_reports = self._log.count_reports(1)
        while num_reports < num_ranks and time.monotonic() < deadline and self._log.is_served():
            time.sleep(_POLL_S)
            num_reports = self._log.count_reports()
        # Let rank 0 end last. Rank 0 may serve the store, from which the other ranks still read
        # whether all ranks have reported.
        if self._rank == 0:
            time.sleep(_LINGER_S)

    def _entry(self, stack: Stack) -> Entry:
        """Return an entry that describes what this rank does now: its collective, or its line of code."""
        for _, collective in list(self.waits.values()):
            return Entry(self._rank, f"in {collective}{self._history(stack, last=False)}")
        place = stack.place(self._libraries)
        return Entry(self._rank, f"at {place}{self._history(stack)}")

    def _history(self, stack: Stack | None = None, *, last: bool = True) -> str:
        """Describe the step of this rank, and the last collective that it entered."""
        shown = []
        if self._step is not None:
            name, place = self._step
            phase = stack.phase() if stack else ""
            shown.append(f"in step {name}, {phase}" if phase else f"last step {name}, at {place}")
        if last:
            shown.append(f"last {self._last}" if self._last else "no collective")
        return "".join(f"; {each}" for each in shown)


class Waiting:
    """A context in which a thread of this rank waits for a collective."""

    __slots__ = ("_collective", "_watchdog")

    def __init__(self, watchdog: StoreWatchdog, collective: Collective) -> None:
        self._watchdog = watchdog
        self._collective = collective

    def __enter__(self) -> None:
        self._watchdog.waits[threading.get_ident()] = time.monotonic(), self._collective

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        watchdog, collective = self._watchdog, self._collective
        try:
            if error is not None:
                watchdog.diagnose(error, collective.function, collective.axis)
        finally:
            del watchdog.waits[threading.get_ident()]
            if collective.number:
                watchdog.progress_at = time.monotonic()


def _write(report: str) -> None:
    """Flush stdout and stderr, if possible, then write the report to stderr."""
    # Flush each stream in a thread, since a thread that hangs may hold the lock of the stream. A
    # stream is None if the parent process has closed it.
    for stream in filter(None, (sys.stdout, sys.stderr)):
        flushing = threading.Thread(target=stream.flush, daemon=True)
        flushing.start()
        flushing.join(_SLACK_S)
    data = report.encode(errors="backslashreplace")
    # The parent process may have closed stderr.
    with suppress(OSError):
        while data:
            data = data[os.write(_STDERR, data) :]


def ending_error() -> BaseException | None:
    """Return the error that this process ends with, if any."""
    # Exit handlers run after Python has printed the traceback and set `last_value`.
    return sys.exc_info()[1] or getattr(sys, "last_value", None)


def _reason() -> str:
    error = ending_error()
    if error is None:
        return ""
    first_line = str(error).partition("\n")[0][:200]
    return f" by {type(error).__name__}" + (f": {first_line}" if first_line else "")
