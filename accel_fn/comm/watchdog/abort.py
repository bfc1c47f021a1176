"""Aborting a world that hangs: every rank prints a report, then its process ends."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from accel_fn.comm.watchdog.hang_report import Stack, list_ranks
from accel_fn.comm.watchdog.store_log import Entry, StoreLog

EXIT_CODE = 124
"""Exit code of a process whose world timed out, as of `timeout` in coreutils."""

_SLACK_S, _LINGER_S, _GLANCE_S = 1.0, 0.3, 0.05


@dataclass(frozen=True, slots=True)
class Abort:
    """The end of all ranks together: all print their reports first, so that no launcher cuts one short."""

    log: StoreLog
    rank: int
    world_size: int
    notice_s: float
    """Time until every rank that can has seen the request to abort."""
    begun: threading.Lock = field(default_factory=threading.Lock)

    def run(self, reason: str, stacks: Mapping[str, Stack], entry: Entry) -> NoReturn:
        """Write a report to stderr, wait for those of the peers, and end this process."""
        while not self.begun.acquire(blocking=False):
            time.sleep(60)  # another thread does it already
        try:
            self.log.add(entry)
            entries = self.wait_for_entries(
                lambda found: len(found) == self.world_size, self.notice_s
            )
            _write(self._report(reason, {**entries, self.rank: entry}, stacks))
            self.wait_for_reports(sum(not each.left for each in entries.values()))
        finally:
            os._exit(EXIT_CODE)

    def wait_for_entries(
        self, enough: Callable[[Mapping[int, Entry]], bool], patience_s: float
    ) -> dict[int, Entry]:
        """Return the entries of the log as soon as they are enough, or time is up."""
        deadline = time.monotonic() + patience_s + _SLACK_S
        while True:
            entries = self.log.entries()
            if enough(entries) or time.monotonic() > deadline or not self.log.is_served():
                return entries
            time.sleep(_GLANCE_S)

    def _report(
        self, reason: str, entries: Mapping[int, Entry], stacks: Mapping[str, Stack]
    ) -> str:
        rank = f"rank {self.rank} of {self.world_size} ({socket.gethostname()}, pid {os.getpid()})"
        shown = [f"{name}, innermost call last:\n{stack}" for name, stack in stacks.items()]
        head = f"accel_fn: {rank} ends with exit code {EXIT_CODE}: {reason}\n"
        ranks = list_ranks(entries, self.world_size)
        return "".join([head, ranks, self.log.missing_server(), *shown])

    def wait_for_reports(self, num_ranks: int) -> None:
        """Return when so many ranks have reported, this one included, or time is up."""
        deadline = time.monotonic() + self.notice_s + _SLACK_S
        num_reports = self.log.count_reports(1)
        while num_reports < num_ranks and time.monotonic() < deadline and self.log.is_served():
            time.sleep(_GLANCE_S)
            num_reports = self.log.count_reports()
        if self.rank == 0:
            time.sleep(_LINGER_S)  # it may serve the store that its peers read just now


def _write(report: str) -> None:
    """Flush what was printed so far, if possible, and write the report at once."""
    for stream in (sys.stdout, sys.stderr):  # in a thread, since a stuck one may hold their locks
        flushing = threading.Thread(target=stream.flush, daemon=True)
        flushing.start()
        flushing.join(_SLACK_S)
    data = report.encode(errors="backslashreplace")
    while data:
        data = data[os.write(2, data) :]
