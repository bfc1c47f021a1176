"""Data sets and samplers that get the epoch by `set_epoch`, though several passes share them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary


class _Shared:
    """The epoch of an object that several passes may read, and the lock of the pass that reads it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.epoch: int | None = None
        """None where it is unknown."""


_LOCK = threading.Lock()
# A table of the process, since passes that share an object know nothing of each other: the epochs of
# a training and a validation loader over one data set, or a pass under `prefetch` and the next one.
# Keyed by the id of the object, which each InEpoch keeps alive.
_SHARED: WeakValueDictionary[int, _Shared] = WeakValueDictionary()


class InEpoch:
    """A context in which all `readers` that have `set_epoch` are in the epoch, and no other pass reads them.

    `set_epoch` is called when it is first entered, and again where another pass has set another
    epoch since: some readers look at it while they are read. With the epoch None it is not called.
    """

    def __init__(self, readers: Iterable[Any], epoch: int | None, *, alone: bool = False) -> None:
        """With `alone`, share no lock: a process of one pass may have been forked with the lock held."""
        distinct = {id(each): each for each in readers if hasattr(each, "set_epoch")}
        shared = {key: _Shared() if alone else _shared_of(key) for key in distinct}
        self.epoch = epoch
        self._readers = [(each, shared[key]) for key, each in distinct.items()]
        # All passes take locks in one order: else two that share several readers could deadlock.
        self._locks = [shared[key].lock for key in sorted(shared)]
        self._is_set = False

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.acquire()
        try:
            for reader, shared in self._readers:
                if self.epoch is None:
                    shared.epoch = None  # the loop may have set any epoch by hand
                elif not self._is_set or shared.epoch != self.epoch:
                    reader.set_epoch(self.epoch)
                    shared.epoch = self.epoch
            self._is_set = True
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for lock in self._locks:
            lock.release()


def _shared_of(key: int) -> _Shared:
    with _LOCK:
        return _SHARED.setdefault(key, _Shared())
