"""Data sets and samplers that are told an epoch, by passes that share them."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakValueDictionary


class _Shared:
    """What is known of an object that several passes may read."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.epoch: int | None = None


_LOCK = threading.Lock()
_SHARED: WeakValueDictionary[int, _Shared] = (
    WeakValueDictionary()
)  # by id: who holds one holds its object


class Told:
    """Inside, `reader` has been told the epoch, by `set_epoch` where it has that, and no other pass reads it.

    It is told when it is first entered, and again where another pass has told it another epoch
    since: some look at it while they are read.
    """

    def __init__(self, reader: Any, epoch: int, *, alone: bool = False) -> None:
        """`alone`: in a process of one pass. A lock of the main process might be held there for ever."""
        self._reader = reader
        self._epoch = epoch
        self._is_told = False
        self._shared: _Shared | None = None
        if hasattr(reader, "set_epoch"):
            self._shared = _Shared() if alone else _shared_of(reader)

    def __enter__(self) -> None:
        if self._shared is None:
            return
        self._shared.lock.acquire()
        try:
            if not self._is_told or self._shared.epoch != self._epoch:
                self._reader.set_epoch(self._epoch)
                self._is_told, self._shared.epoch = True, self._epoch
        except BaseException:
            self._shared.lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        if self._shared is not None:
            self._shared.lock.release()


def _shared_of(reader: Any) -> _Shared:
    with _LOCK:
        return _SHARED.setdefault(id(reader), _Shared())
