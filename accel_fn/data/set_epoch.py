"""Call `set_epoch` of readers, that is data sets and samplers, which several passes may share.

The loop may call `set_epoch` too. `LoopEpochs` notices this: an attribute of the reader then holds
another epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from accel_fn.data.loader import ShardedLoader

# A list in an attribute may be a long list of samples. Search only this many of its items.
_SEVERAL = 100
# Values that readers have in their "epoch" attributes before the first `set_epoch`.
_FIRST = (-1, 0)


class _Shared:
    """The epoch of an object that several passes may share, and the lock that a pass holds to read it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.epoch: int | None = None
        """The epoch that a pass has set; None if it is unknown."""
        self.shown: list[int] = []
        """The integers in the object's "epoch" attributes, read right after a pass has set its epoch."""


_LOCK = threading.Lock()
# One table for the process, since passes that share an object do not know each other: those of a
# training and a validation loader over one data set, or a pass under `prefetch` and the next one.
# The key is the id of the object, which stays valid because each InEpoch keeps the object alive.
_SHARED: WeakValueDictionary[int, _Shared] = WeakValueDictionary()


class InEpoch:
    """A context in which all `readers` with `set_epoch` have one epoch, and no other pass uses them.

    The context calls `set_epoch` when it is first entered, and again if another pass has set
    another epoch since: some readers use their epoch while they are read. With `epoch=None`, it
    does not call `set_epoch`.
    """

    def __init__(self, readers: Iterable[Any], epoch: int | None, *, alone: bool = False) -> None:
        """With `alone`, use new locks: a worker may have been forked while a lock was held."""
        distinct = {id(each): each for each in readers if hasattr(each, "set_epoch")}
        shared = {key: _Shared() if alone else _shared_of(key) for key in distinct}
        self.epoch = epoch
        self._readers = [(each, shared[key]) for key, each in distinct.items()]
        # All passes take locks in the order of the keys: otherwise two passes that share readers
        # could deadlock.
        self._locks = [shared[key].lock for key in sorted(shared)]
        self._is_set = False

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.acquire()
        try:
            for reader, shared in self._readers:
                if self.epoch is None:
                    # The loop sets the epoch by hand, so it is unknown here.
                    shared.epoch = None
                elif not self._is_set or shared.epoch != self.epoch:
                    reader.set_epoch(self.epoch)
                    shared.epoch, shared.shown = self.epoch, _shown(reader)
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


def reached_from(root: Any, may_follow: Callable[[Any], bool]) -> list[Any]:
    """List an object and, at any depth, the objects in its attributes that `may_follow` accepts."""
    found = [root]
    # Objects that are found below are appended to the list, so this loop visits them too.
    for each in found:
        for value in getattr(each, "__dict__", {}).values():
            items = value.values() if isinstance(value, Mapping) else value
            is_list = isinstance(value, list | tuple | Mapping)
            several = [value, *islice(items, _SEVERAL)] if is_list else [value]
            found += [one for one in several if may_follow(one) and not _is_among(one, found)]
    return found


def _is_among(value: Any, found: list[Any]) -> bool:
    return any(value is each for each in found)


def may_sample(value: Any) -> bool:
    """Return whether an object is a sampler: it can be iterated, and is not an indexed data set."""
    kind = type(value)
    is_sampler = isinstance(value, Sampler)
    return is_sampler or (hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__"))


def may_hold_samples(value: Any) -> bool:
    """Return whether an object is a data set, or has a user's class that can be read as one."""
    kind = type(value)
    if isinstance(value, Tensor | nn.Module | ShardedLoader | type):
        return False
    can_be_read = hasattr(kind, "__getitem__") or hasattr(kind, "__iter__")
    return isinstance(value, Dataset) or (can_be_read and hasattr(value, "__dict__"))


class LoopEpochs:
    """Notices readers on which the loop has called `set_epoch` since the last pass.

    A reader holds its epoch in an attribute that has "epoch" in its name. If the value has changed
    since the last check, and no pass has set the new value, the loop has set it.
    """

    def __init__(self, root: Any, may_follow: Callable[[Any], bool]) -> None:
        self._root, self._may_follow = root, may_follow
        self._known: dict[int, tuple[Any, _Shared, list[int]]] = {}
        """For each reader, by its id: the reader, its `_Shared`, and the integers in its "epoch"
        attributes at the last check."""

    def are_set(self) -> bool:
        """Return whether the loop has set an epoch since the last call, or before the first."""
        found = False
        for reader in reached_from(self._root, self._may_follow):
            shown = _shown(reader)
            if not (hasattr(reader, "set_epoch") and shown):
                continue
            _, shared, known = self._known.get(id(reader)) or (reader, _shared_of(id(reader)), None)
            is_new = shown != known if known is not None else shown[0] not in _FIRST
            found |= is_new and shown != shared.shown
            self._known[id(reader)] = reader, shared, shown
        return found


def _shown(reader: Any) -> list[int]:
    """Return the integers in those attributes of an object whose names contain "epoch"."""
    values = [v for name, v in getattr(reader, "__dict__", {}).items() if "epoch" in name.lower()]
    numbers = [v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for v in values]
    return [each for each in numbers if type(each) is int]
