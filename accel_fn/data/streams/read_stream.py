"""Reading a user's stream: as which worker, in which epoch, and with which random numbers.

Which worker a data set takes itself for is a private global of torch;
tests/step/test_torch_internals.py says so loudly when it changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as _torch_worker
from torch.utils.data._utils.worker import WorkerInfo

from accel_fn.data.borrowed_rng import Generators
from accel_fn.data.order import mix
from accel_fn.data.prefetch import Reader
from accel_fn.data.samplers.set_epoch import Told

_BLOCK = 1024
_INFO_LOCK = threading.RLock()  # simulated ranks are threads that share torch's global


@contextmanager
def shown(info: WorkerInfo | None) -> Iterator[None]:
    """Let `get_worker_info` say this for a while."""
    before = _torch_worker._worker_info
    _torch_worker._worker_info = info
    try:
        yield
    finally:
        _torch_worker._worker_info = before


def worker_over(data: IterableDataset[Any]) -> WorkerInfo | None:
    """Which worker of a loader over `data` this process is; None in the main process.

    What a simulated rank lets another data set see for a while is not that.
    """
    info = get_worker_info()
    return info if info is not None and info.dataset is data else None


class Stream:
    """One pass over a data set, item by item, within `reading()`.

    The global generators are the stream's alone while it is read, seeded by
    seed and epoch: a shuffle or an augmentation that draws from them is the
    same wherever the stream is read, and again when a run resumes. Only
    `prefetch` without workers leaves them as they are, since the loop draws
    from them at the same time.
    """

    def __init__(
        self,
        data: IterableDataset[Any],
        epoch: int,
        *,
        seed: int,
        info: WorkerInfo | None = None,
        in_worker: bool = False,
    ) -> None:
        self._data = data
        self._epoch = epoch
        self._seed = mix(mix(seed) + epoch)
        self._info = info
        self._in_worker = in_worker
        self._told = Told(data, epoch, alone=in_worker)
        self._draws = Generators(self._seed)
        self._items: Iterator[Any] | None = None
        self._ahead: list[Any] = []
        self.num_read = 0  # items so far
        self._ended = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let the data set see the worker that it is read by, and its own random numbers."""
        if self._in_worker:
            with shown(self._info), self._draws:
                yield
        elif isinstance(threading.current_thread(), Reader):
            with self._shown():
                yield
        else:
            with self._shown(), self._draws:
                yield

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """In the main process, which is no worker unless we say so."""
        if self._info is None:
            yield
            return
        with _INFO_LOCK, shown(self._info):
            yield

    def take(self, count: int) -> list[Any]:
        """The next items: fewer than `count` at the end, then none."""
        found, self._ahead = self._ahead[:count], self._ahead[count:]
        return found + self._read(count - len(found)) if len(found) < count else found

    def peek(self, count: int) -> list[Any]:
        """The next items, which stay the next."""
        self._ahead = self.take(count)
        return self._ahead

    def drop(self, count: int) -> None:
        """Read on without keeping."""
        while count > 0 and (items := self.take(min(_BLOCK, count))):
            count -= len(items)

    def _read(self, count: int) -> list[Any]:
        found: list[Any] = []
        if self._ended:  # some iterators begin anew when asked again
            return found
        try:
            with self._told:
                if self._items is None:
                    self._items = chain(self._data)  # asked once: its iterator may begin anew
                found.extend(islice(self._items, count))
        except Exception as error:
            where = f"after {self.num_read + len(found)} items of epoch {self._epoch}"
            error.add_note(f"shard_loader: the stream failed {where}")
            raise
        self.num_read += len(found)
        self._ended = len(found) < count
        return found


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """A user's worker_init_fn, to which a worker of ours looks like one over the user's data set.

    Attributes:
        fn: takes a worker's number.
        first: number of this rank's first worker among all that split the
            source; None where each sees the whole of what it is given.
        num_workers: how many split it.
    """

    fn: Callable[[int], None]
    first: int | None = None
    num_workers: int = 1

    def __call__(self, worker: int) -> None:
        """Run it, in worker `worker` of this rank."""
        ours = get_worker_info()
        assert ours is not None
        ours_data: Any = ours.dataset
        number = 0 if self.first is None else self.first + worker
        theirs = WorkerInfo(
            id=number, num_workers=self.num_workers, seed=ours.seed, dataset=ours_data.data
        )
        with shown(theirs):
            self.fn(worker if self.first is None else number)
