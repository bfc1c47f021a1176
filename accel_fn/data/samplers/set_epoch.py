"""Data sets and samplers that get the epoch by `set_epoch`, though several passes share them."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakValueDictionary


class _Shared:
    """The epoch of an object that several passes may read."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.epoch: int | None = None


_LOCK = threading.Lock()
_SHARED: WeakValueDictionary[int, _Shared] = (
    WeakValueDictionary()
)  # keyed by the id of the object, which each InEpoch keeps alive


class InEpoch:
    """A context in which `reader` is in the epoch, and no other pass reads it.

    `set_epoch` is called when it is first entered, and again where another pass has set another
    epoch since: some readers look at it while they are read.
    """

    def __init__(self, reader: Any, epoch: int, *, alone: bool = False) -> None:
        """With `alone`, take no lock: a process of one pass may have been forked with the lock held."""
        self._reader = reader
        self._epoch = epoch
        self._is_set = False
        self._shared: _Shared | None = None
        if hasattr(reader, "set_epoch"):
            self._shared = _Shared() if alone else _shared_of(reader)

    def __enter__(self) -> None:
        if self._shared is None:
            return
        self._shared.lock.acquire()
        try:
            if not self._is_set or self._shared.epoch != self._epoch:
                self._reader.set_epoch(self._epoch)
                self._is_set, self._shared.epoch = True, self._epoch
        except BaseException:
            self._shared.lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        if self._shared is not None:
            self._shared.lock.release()


def _shared_of(reader: Any) -> _Shared:
    with _LOCK:
        return _SHARED.setdefault(id(reader), _Shared())
