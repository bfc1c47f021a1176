"""Data sets and samplers that get the epoch by `set_epoch`, though several passes share them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

from torch.utils.data import ConcatDataset, StackDataset, Subset

from accel_fn.data.seed_samples import SeededSamples


class _Shared:
    """The epoch of an object that several passes may read."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.epoch: int | None = None
        """None where it is unknown."""


_LOCK = threading.Lock()
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
        # In one order in all passes: two that share several readers would wait for each other.
        self._locks = [shared[key].lock for key in sorted(shared)]
        self._is_set = False

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.acquire()
        try:
            for reader, shared in self._readers:
                if self.epoch is None:
                    shared.epoch = None  # the loop may have set any epoch
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


def nested(dataset: Any) -> Iterator[Any]:
    """Yield a map-style data set and those that it reads, the outermost first."""
    yield dataset
    inner: Iterable[Any] = ()
    if isinstance(dataset, Subset):
        inner = [dataset.dataset]
    elif isinstance(dataset, SeededSamples):
        inner = [dataset.data]
    elif isinstance(dataset, ConcatDataset | StackDataset):
        several: Any = dataset.datasets
        inner = several.values() if isinstance(several, Mapping) else several
    for each in inner:
        yield from nested(each)
