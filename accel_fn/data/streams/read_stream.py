"""Passes over a user's stream: by which workers, in which epoch, and with which random numbers.

Which worker a data set takes itself for is a private global of torch;
tests/core/test_torch_internals.py fails when it changes.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as _torch_worker
from torch.utils.data._utils.worker import WorkerInfo

from accel_fn.core.batch import ATOMS, opened
from accel_fn.data.order import mix
from accel_fn.data.prefetch import Reader
from accel_fn.data.random_generators import Generators
from accel_fn.data.set_epoch import InEpoch, may_hold_samples, reached_from
from accel_fn.data.workers import (
    WORKER_OPTIONS,
    IdlePools,
    WorkerPool,
    WorkerProgress,
    make_loader,
    worker_error,
)

_BLOCK = 1024
_INFO_LOCK = (
    threading.RLock()
)  # simulated ranks are threads that share torch's global `_worker_info`
# Simulated ranks are threads: a worker that one of them forks while another forks its own would
# hold the pipe by which that other is known to have ended, and locks that were held meanwhile.
_STARTING = threading.Lock()
_KEPT = (*WORKER_OPTIONS, "pin_memory", "pin_memory_device", "generator")


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
    """The data set of a loader's workers: a user's stream from `place` [epoch, first batch, keeps] on.

    A persistent worker is given its next place in shared memory.
    """

    place: Tensor
    data: Any
    rank: int
    seed: int
    progress: WorkerProgress | None = field(default=None, init=False)
    """Memory that workers write their progress to."""
    reads: ClassVar[str]
    """Unit of the progress, with a gap for the number."""

    def worker(self) -> WorkerInfo | None:
        """Return the worker of a loader over this stream that this process is; None in the main process."""
        info = get_worker_info()
        # A simulated rank may let another data set see a worker that this process is not.
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
        keeps: bool = False,
        info: WorkerInfo | None = None,
        in_worker: bool = False,
        num_hashed: int = 0,
    ) -> None:
        """With `keeps`, the data set stays in the epoch that the loop has set; hash the first items."""
        self._data = data
        self._epoch = epoch
        self._info = info
        self._in_worker = in_worker
        readers = reached_from(data, may_hold_samples)
        self._in_epoch = InEpoch(readers, None if keeps else epoch, alone=in_worker)
        self._generators = Generators(mix(mix(seed) + epoch))
        self._items: Iterator[Any] | None = None
        self.num_read = 0  # items so far
        self._num_hashed = num_hashed
        self.hashes: list[int] = []
        """Hashes of the first items that were read."""
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

    def drop(self, count: int) -> None:
        """Skip items."""
        while count > 0 and (items := self.take(min(_BLOCK, count))):
            count -= len(items)

    def take(self, count: int) -> list[Any]:
        """Return the next items: fewer than `count` at the end, then none."""
        found: list[Any] = []
        # Some iterators begin again after their end.
        if self._ended:
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
        if len(self.hashes) < self._num_hashed:
            self.hashes += map(hash_of, found[: self._num_hashed - len(self.hashes)])
        self.num_read += len(found)
        self._ended = len(found) < count
        return found


def hash_of(item: Any) -> int:
    """Hash the tensors, arrays, numbers and texts of an item; others count by their class alone."""
    found = 0
    for leaf in pytree.tree_leaves(opened(item)):
        if isinstance(leaf, Tensor) and leaf.is_cpu and leaf.layout is torch.strided:
            known = leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(leaf, np.ndarray | np.generic) and leaf.dtype != object:
            known = leaf.tobytes()
        else:
            known = repr(leaf if isinstance(leaf, ATOMS) else type(leaf).__name__).encode()
        found = zlib.crc32(known, found)
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


def options_of(loader: DataLoader[Any], init: Callable[[Any], WorkerInit]) -> dict[str, Any]:
    """Select the options of a user's DataLoader that a loader over our stream takes over."""
    kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if kept["worker_init_fn"] is not None:
        kept["worker_init_fn"] = init(kept["worker_init_fn"])
    return kept


class _StreamPool(WorkerPool):
    """Workers over one of our streams, from a place that each pass sets."""

    def __init__(
        self, stream_of: Callable[[Tensor], WorkerStream], options: dict[str, Any]
    ) -> None:
        self.place = torch.zeros(3, dtype=torch.int64)
        if options["persistent_workers"]:
            self.place.share_memory_()  # type: ignore[no-untyped-call]
        stream = stream_of(self.place)
        if options["num_workers"]:
            stream.progress = WorkerProgress(options["num_workers"])
        super().__init__(make_loader(stream, **options), stream.where)


class Passes:
    """Passes over one of our streams, each from a place: [epoch, first batch, keeps], int64.

    Every pass has workers of its own. Persistent workers serve one pass after the other, and get
    the place through shared memory. Where the user gave no generator, workers are seeded by seed
    and epoch: torch would draw from the global one at every pass.
    """

    def __init__(
        self, stream_of: Callable[[Tensor], WorkerStream], options: dict[str, Any], seed: int
    ) -> None:
        self._seed = seed
        self._own = torch.Generator()
        options = {**options, "generator": options.get("generator") or self._own}
        make = partial(_StreamPool, stream_of, options)
        self.pools = IdlePools(make, options["persistent_workers"])

    def start(self, epoch: int, first_batch: int, *, keeps: bool = False) -> Iterator[Any]:
        """Yield what the stream gives from there on. Workers start here, not at the first item."""
        self._own.manual_seed(mix(mix(self._seed) + epoch))
        with _STARTING:
            pool = self.pools.take()
            pool.place[:] = torch.tensor([epoch, first_batch, keeps])
            pool.start()
        return self._items(pool)

    def _items(self, pool: _StreamPool) -> Iterator[Any]:
        failed = False
        try:
            yield from pool.items()
        except Exception as error:
            failed = True
            if lost := pool.lost(after=error):
                raise worker_error(lost) from error
            raise
        finally:
            self.pools.give_back(pool, failed=failed)
