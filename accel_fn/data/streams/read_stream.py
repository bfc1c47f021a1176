"""One pass over a user's stream: as which worker, in which epoch, and with which random numbers.

Which worker a data set takes itself for is a private global of torch;
tests/step/test_torch_internals.py fails when it changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, ClassVar

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as _torch_worker
from torch.utils.data._utils.worker import WorkerInfo

from accel_fn.data.borrowed_rng import Generators
from accel_fn.data.order import mix
from accel_fn.data.prefetch import Reader
from accel_fn.data.set_epoch import InEpoch
from accel_fn.data.workers import Progress

_BLOCK = 1024
_INFO_LOCK = threading.RLock()  # simulated ranks are threads that share torch's global


@contextmanager
def shown(info: WorkerInfo | None) -> Iterator[None]:
    """Let `get_worker_info` return this inside the context."""
    before = _torch_worker._worker_info
    _torch_worker._worker_info = info
    try:
        yield
    finally:
        _torch_worker._worker_info = before


@dataclass(eq=False)
class WorkerStream(IterableDataset[Any]):
    """The data set of a loader's workers: a user's stream from `place` [epoch, first batch] on.

    A persistent worker is given its next place in shared memory.
    """

    place: Tensor
    data: Any
    rank: int
    seed: int
    progress: Progress | None = field(default=None, init=False)
    """Memory that workers write their progress to."""
    reads: ClassVar[str]
    """Unit of the progress, with a gap for the number."""

    def worker(self) -> WorkerInfo | None:
        """Return the worker of a loader over this stream that this process is; None in the main process.

        What a simulated rank shows another data set for a while is not that.
        """
        info = get_worker_info()
        return info if info is not None and info.dataset is self else None

    def where(self, worker: int) -> str:
        """Describe what a worker is reading; empty if unknown."""
        at = None if self.progress is None else self.progress.of(worker)
        return f" {self.reads.format(at[0])} of epoch {int(self.place[0])}" if at else ""


class Stream:
    """One pass over a data set, item by item, within `reading()`.

    The global generators belong to the stream while it is read, seeded by seed and epoch: a shuffle
    or an augmentation that draws from them is the same wherever the stream is read, and again when
    a run resumes. Only `prefetch` without workers leaves them alone, since the loop draws from
    them at the same time.
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
        self._info = info
        self._in_worker = in_worker
        self._in_epoch = InEpoch([data], epoch, alone=in_worker)
        self._generators = Generators(mix(mix(seed) + epoch))
        self._items: Iterator[Any] | None = None
        self._ahead: list[Any] = []
        self.num_read = 0  # items so far
        self._ended = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let the data set see the worker that reads it, and its own random numbers."""
        with ExitStack() as stack:
            if self._in_worker or self._info is not None:
                if not self._in_worker:
                    stack.enter_context(_INFO_LOCK)
                stack.enter_context(shown(self._info))
            if self._in_worker or not isinstance(threading.current_thread(), Reader):
                stack.enter_context(self._generators)
            yield

    def take(self, count: int) -> list[Any]:
        """Return the next items: fewer than `count` at the end, then none."""
        found, self._ahead = self._ahead[:count], self._ahead[count:]
        return found + self._read(count - len(found)) if len(found) < count else found

    def peek(self, count: int) -> list[Any]:
        """Return the next items, and keep them for the next `take`."""
        self._ahead = self.take(count)
        return self._ahead

    def drop(self, count: int) -> None:
        """Skip items."""
        while count > 0 and (items := self.take(min(_BLOCK, count))):
            count -= len(items)

    def _read(self, count: int) -> list[Any]:
        found: list[Any] = []
        if self._ended:  # some iterators begin again after their end
            return found
        try:
            with self._in_epoch:
                if self._items is None:
                    self._items = chain(self._data)  # one iterator: some start again at each `iter`
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
    """Calls a user's worker_init_fn while `get_worker_info` shows a worker over the user's data set."""

    fn: Callable[[int], None]
    first: int | None = None  # this rank's first worker among all that split the stream
    num_workers: int = 1  # that split it

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        stream: Any = info.dataset
        number = 0 if self.first is None else self.first + worker
        users = WorkerInfo(
            id=number, num_workers=self.num_workers, seed=info.seed, dataset=stream.data
        )
        with shown(users):
            self.fn(worker if self.first is None else number)
