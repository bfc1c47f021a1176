"""What the ranks of a world leave for each other to read, in the store in which they met."""

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
_LOG, _ALARM, _TOLD = "accel_fn/log", "accel_fn/alarm", "accel_fn/told"


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
    """What a rank has to say of itself, once."""

    rank: int
    doing: str
    left: bool = False


class Board:
    """A log that every rank may add to, an alarm, and a count of who has reported.

    Whoever serves the store may be gone: then nothing is read and nothing is
    said, and nothing waits.
    """

    def __init__(self, store: Store, address: tuple[str, int] | None) -> None:
        self._store = store.clone()  # the other one may be in use, by a rendezvous that waits
        self._store.set_timeout(timedelta(seconds=_ANSWER_S))
        self._address = address

    def log(self, entry: Entry) -> None:
        """Add to the log."""
        self._ask(lambda store: store.append(_LOG, json.dumps(asdict(entry)) + "\n"), None)

    def entries(self) -> dict[int, Entry]:
        """The latest of every rank that has said something."""

        def read(store: Store) -> bytes:
            return store.get(_LOG) if store.check([_LOG]) else b""

        lines = self._ask(read, b"").decode().splitlines()
        found = [Entry(**json.loads(line)) for line in lines]
        return {entry.rank: entry for entry in found}

    def raise_alarm(self) -> None:
        """Ask every rank to report and end."""
        self._ask(lambda store: store.add(_ALARM, 1), 0)

    def is_alarmed(self) -> bool:
        """Has any rank asked?"""
        return self._ask(lambda store: store.check([_ALARM]), False)

    def count_reports(self, more: int = 0) -> int:
        """How many ranks have reported, with `more` that have now."""
        return self._ask(lambda store: store.add(_TOLD, more), 0)

    def is_served(self) -> bool:
        """Is somebody there to ask? Torch's client prints pages where it finds nobody."""
        if self._address is None:
            return True
        try:
            with closing(socket.create_connection(self._address, _ANSWER_S)):
                return True
        except OSError:
            return False

    def absence(self) -> str:
        """A line that tells why nothing can be read, where that is so."""
        if self.is_served() or self._address is None:
            return ""
        host, port = self._address
        return (
            f"  nobody answers at {host}:{port}: rank 0, or the launcher that served it, has left\n"
        )

    def _ask(self, question: Callable[[Store], T], otherwise: T) -> T:
        if not self.is_served():
            return otherwise
        try:
            return question(self._store)
        except RuntimeError:
            return otherwise
