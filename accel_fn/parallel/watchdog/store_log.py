"""The store log: the latest work of each rank, kept in the store of the rendezvous for its peers."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

T = TypeVar("T")

_ANSWER_S = 5.0
_LOG, _ABORT, _REPORTS = "accel_fn/log", "accel_fn/abort", "accel_fn/reports"


class Store(Protocol):
    """The part of torch's stores that is used here."""

    def append(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def clone(self) -> Store: ...
    def set_timeout(self, timeout: timedelta, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """The current work of one rank, or its end."""

    rank: int
    doing: str
    left: bool = False
    """Has it left the world?"""


class StoreLog:
    """A log that every rank may add to, a request to abort, and a count of reports.

    Without a server nothing is read or written, and nothing waits.
    """

    def __init__(self, store: Store, address: tuple[str, int] | None) -> None:
        # The original may be in use, by a rendezvous that waits.
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=_ANSWER_S))
        self._address = address

    def add(self, entry: Entry) -> None:
        """Append an entry."""
        self._call(lambda store: store.append(_LOG, json.dumps(asdict(entry)) + "\n"), None)

    def entries(self) -> dict[int, Entry]:
        """Return the latest entry of every rank that has one."""

        def read(store: Store) -> bytes:
            return store.get(_LOG) if store.check([_LOG]) else b""

        lines = self._call(read, b"").decode().splitlines()
        found = [Entry(**json.loads(line)) for line in lines]
        return {entry.rank: entry for entry in found}

    def request_abort(self) -> None:
        """Request that every rank report and abort."""
        self._call(lambda store: store.add(_ABORT, 1), 0)

    def is_abort_requested(self) -> bool:
        """Has any rank requested an abort?"""
        return self._call(lambda store: store.check([_ABORT]), False)

    def count_reports(self, more: int = 0) -> int:
        """Return how many ranks have reported, after adding `more`."""
        return self._call(lambda store: store.add(_REPORTS, more), 0)

    def is_served(self) -> bool:
        """Does the server accept connections?"""
        # Torch's client would print pages of native frames where no server answers.
        if self._address is None:
            return True
        try:
            with closing(socket.create_connection(self._address, _ANSWER_S)):
                return True
        except OSError:
            return False

    def missing_server(self) -> str:
        """Return a line for a report if the server is gone, else nothing."""
        if self.is_served() or self._address is None:
            return ""
        host, port = self._address
        return f"  no store answers at {host}:{port}: rank 0, or the launcher that served it, has left\n"

    def _call(self, function: Callable[[Store], T], otherwise: T) -> T:
        if not self.is_served():
            return otherwise
        try:
            return function(self._store)
        except RuntimeError:
            return otherwise
