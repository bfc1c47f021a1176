"""Ending a world that cannot go on: every rank says where it is, and its process ends."""

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
from accel_fn.comm.watchdog.store_log import Board, Entry

EXIT_CODE = 124
"""Of a process whose world ran out of time, as of `timeout` in coreutils."""

_SLACK_S, _LINGER_S, _GLANCE_S = 1.0, 0.3, 0.05


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank ends together with the others: reports first, so that no launcher cuts one short."""

    board: Board
    rank: int
    world_size: int
    notice_s: float
    """Until every rank that can has seen an alarm."""
    begun: threading.Lock = field(default_factory=threading.Lock)

    def end(self, reason: str, stacks: Mapping[str, Stack], mine: Entry) -> NoReturn:
        """Write a report to stderr, wait until the others have, and end this process."""
        while not self.begun.acquire(blocking=False):
            time.sleep(60)  # whichever thread came first is at it
        try:
            self.board.log(mine)
            entries = self.hear(lambda found: len(found) == self.world_size, self.notice_s)
            _write(self._report(reason, {**entries, self.rank: mine}, stacks))
            self.wait_for_reports(sum(not entry.left for entry in entries.values()))
        finally:
            os._exit(EXIT_CODE)

    def hear(
        self, enough: Callable[[Mapping[int, Entry]], bool], patience_s: float
    ) -> dict[int, Entry]:
        """What the ranks have to say, as soon as that is enough."""
        deadline = time.monotonic() + patience_s + _SLACK_S
        while True:
            entries = self.board.entries()
            if enough(entries) or time.monotonic() > deadline or not self.board.is_served():
                return entries
            time.sleep(_GLANCE_S)

    def _report(
        self, reason: str, entries: Mapping[int, Entry], stacks: Mapping[str, Stack]
    ) -> str:
        who = f"rank {self.rank} of {self.world_size} ({socket.gethostname()}, pid {os.getpid()})"
        told = [f"{name}, innermost call last:\n{stack}" for name, stack in stacks.items()]
        return "".join(
            [
                f"accel_fn: {who} ends with exit code {EXIT_CODE}: {reason}\n",
                list_ranks(entries, self.world_size),
                self.board.absence(),
                *told,
            ]
        )

    def wait_for_reports(self, num_ranks: int) -> None:
        """Return when so many ranks have reported, this one included; not much later than they can."""
        deadline = time.monotonic() + self.notice_s + _SLACK_S
        num_told = self.board.count_reports(1)
        while num_told < num_ranks and time.monotonic() < deadline and self.board.is_served():
            time.sleep(_GLANCE_S)
            num_told = self.board.count_reports()
        if self.rank == 0:
            time.sleep(_LINGER_S)  # it may serve the store that the others are just looking into


def _write(report: str) -> None:
    """What was printed so far, if it can still be had, and the report in one write."""
    for stream in (sys.stdout, sys.stderr):  # by a thread: what is stuck may hold their locks
        flushing = threading.Thread(target=stream.flush, daemon=True)
        flushing.start()
        flushing.join(_SLACK_S)
    data = report.encode(errors="backslashreplace")
    while data:
        data = data[os.write(2, data) :]
