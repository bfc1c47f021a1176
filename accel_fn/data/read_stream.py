"""Passes over a user's stream: this rank's parts of the batches, made in workers or this process.

`get_worker_info` reads a private global of torch, which this module sets;
tests/core/test_torch_internals.py fails when torch changes it.
"""

from __future__ import annotations

import pickle
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as _torch_worker
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data._utils.worker import WorkerInfo

from accel_fn.core.batch import ATOMS, map_tensors, opened
from accel_fn.core.split_batch import part_bounds, part_sizes
from accel_fn.data.collate import EmptyPart
from accel_fn.data.order import Cut, mix
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
from accel_fn.errors import ArgumentTypeError, message

_BLOCK = 1024
_PART_BLOCK = 16
# The number of first items whose hashes ranks compare.
NUM_HASHED = 16
# Simulated ranks are threads, and share torch's global `_worker_info`. They set it in turn.
_INFO_LOCK = threading.RLock()
# Simulated ranks are threads. They start their workers in turn, for two reasons. A worker that is
# forked while another rank starts workers would inherit the locks that this rank holds. It would
# also keep a pipe of that rank open: the pipe closes only when the last process that holds it ends,
# and the rank takes this as the sign that its workers have ended.
_STARTING = threading.Lock()
_KEPT = (*WORKER_OPTIONS, "pin_memory", "pin_memory_device", "generator")


@contextmanager
def shown(info: WorkerInfo | None) -> Iterator[None]:
    """Make `get_worker_info` return `info` inside the context."""
    before = _torch_worker._worker_info
    _torch_worker._worker_info = info
    try:
        yield
    finally:
        _torch_worker._worker_info = before


class Stream:
    """One pass over a data set, item by item, within `reading()`.

    While the stream is read, it owns the global generators, seeded by seed and epoch. So a shuffle
    or an augmentation that draws from them is the same wherever the stream is read, and again when
    a run resumes. Only `prefetch` without workers does not seed them, since the loop draws from
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
        """With `keeps`, the data set stays in the epoch that the loop has set.

        The first `num_hashed` items are hashed.
        """
        self._data = data
        self._epoch = epoch
        self._info = info
        self._in_worker = in_worker
        readers = reached_from(data, may_hold_samples)
        self._in_epoch = InEpoch(readers, None if keeps else epoch, alone=in_worker)
        self._generators = Generators(mix(mix(seed) + epoch))
        self._items: Iterator[Any] | None = None
        # The number of items read so far.
        self.num_read = 0
        self._num_hashed = num_hashed
        self.hashes: list[int] = []
        """Hashes of the first items that were read."""
        self._ended = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Enter a context in which the data set gets its worker's info and random numbers."""
        with ExitStack() as stack:
            if self._in_worker or self._info is not None:
                if not self._in_worker:
                    stack.enter_context(_INFO_LOCK)
                stack.enter_context(shown(self._info))
            if self._in_worker or not isinstance(threading.current_thread(), Reader):
                stack.enter_context(self._generators)
            yield

    def drop(self, count: int) -> None:
        """Skip `count` items."""
        while count > 0 and (items := self.take(min(_BLOCK, count))):
            count -= len(items)

    def take(self, count: int) -> list[Any]:
        """Return the next items: fewer than `count` at the end, and an empty list after the end."""
        found: list[Any] = []
        # Do not call `next` after the end: some iterators begin again.
        if self._ended:
            return found
        try:
            with self._in_epoch:
                if self._items is None:
                    # Keep one iterator: some data sets start again at each `iter`.
                    self._items = chain(self._data)
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
    """Hash the CPU tensors, arrays, numbers and texts of an item, and the classes of its other values."""
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


def parts_of_stream(
    stream: Stream, cut: Cut, rank: int, *, first_batch: int = 0, stride: int = 1
) -> Iterator[list[Any]]:
    """Yield a rank's part of every `stride`-th global batch of a stream, from `first_batch` on.

    Items outside the part are dropped as early as possible, so that a rank holds at most its part
    and about a quarter of a batch.
    """
    skipped = first_batch
    while True:
        with stream.reading():
            stream.drop(skipped * cut.batch_size)
            held, start, num_read, example = _read_batch(stream, cut, rank)
        size = cut.next_size(num_read)
        if size == 0:
            return
        first, stop = part_bounds(size, cut.world_size, rank)
        yield held[first - start : stop - start] or EmptyPart(example)
        # Free the batch before the next one is read.
        del held, example
        if num_read < cut.batch_size:
            return
        skipped = stride - 1


def _read_batch(stream: Stream, cut: Cut, rank: int) -> tuple[list[Any], int, int, list[Any]]:
    """Read a global batch, and keep the items that may belong to this rank's part.

    Return the kept items, the place of the first of them in the batch, the number of items read,
    and a list of the first item of the batch.
    """
    # The stream may end inside the batch, and the rank's part depends on the number of items read.
    # So hold the items that can still belong to the part, however many items follow.
    held: list[Any] = []
    example: list[Any] = []
    start, count = 0, 0
    _, stop = part_bounds(cut.batch_size, cut.world_size, rank)
    block = max(_PART_BLOCK, cut.batch_size // cut.world_size // 4)
    while count < cut.batch_size:
        wanted = min(block, cut.batch_size - count)
        items = stream.take(wanted)
        held += items[: max(0, stop - count)]
        example = example or items[:1]
        count += len(items)
        first, _ = part_bounds(count, cut.world_size, rank)
        held, start = held[first - start :], first
        if len(items) < wanted:
            break
    return held, start, count, example


@dataclass(frozen=True, slots=True)
class Split:
    """The division of a stream into one shard per reader.

    Worker w of rank r is reader r * readers_per_rank + w.
    """

    # "shard": the data set's method `shard` splits it. "workers": the data set splits itself by
    # `get_worker_info`.
    kind: str
    world_size: int
    readers_per_rank: int

    @property
    def num_readers(self) -> int:
        return self.world_size * self.readers_per_rank


def shard_of(data: Any, num_shards: int, index: int) -> IterableDataset[Any]:
    """Return one shard of a data set, by its method `shard`."""
    shard = data.shard(num_shards=num_shards, index=index)
    if not isinstance(shard, IterableDataset):
        rule, got = "return an IterableDataset", type(shard).__name__
        repair = 'or use split="round_robin"'
        raise ArgumentTypeError(message("shard_loader", "shard()", rule, got, repair))
    return shard


def parts_of_shard(stream: Stream, size: int, *, drop_last: bool) -> Iterator[list[Any]]:
    """Yield lists of `size` items. The last may be shorter; `drop_last` leaves out a shorter one."""
    while True:
        with stream.reading():
            items = stream.take(size)
        if not items or (drop_last and len(items) < size):
            return
        yield items


@dataclass(frozen=True, slots=True)
class End:
    """The end of a pass over a whole stream, with the number of its items."""

    num_items: int


@dataclass(frozen=True, slots=True)
class Noted:
    """A batch with a note for other ranks: hashes of the first items, or a pickled item."""

    batch: Any
    note: Any

    def pin_memory(self) -> Noted:
        """Pin the batch; torch's loader calls this method."""
        return Noted(pin_memory(self.batch), self.note)  # type: ignore[no-untyped-call]


@dataclass(eq=False)
class PartStream(IterableDataset[Any]):
    """The data set of a loader's workers: this rank's batches of the user's stream, for one pass.

    Without a `split`, worker w of n collates this rank's part of every n-th batch from the w-th on,
    and yields an `End` after the last one. Each worker reads the whole stream, and
    `get_worker_info` returns None in the data set. With a `split`, each worker collates parts from
    its own shard.
    """

    place: Tensor
    """Three integers, in memory shared with persistent workers: the epoch, the first batch, and
    whether the data set keeps its epoch."""
    data: Any
    cut: Cut
    split: Split | None
    rank: int
    seed: int
    collate_fn: Callable[[list[Any]], Any]
    progress: WorkerProgress | None = field(default=None, init=False)
    """The shared memory to which workers write their progress; None without workers."""

    def where(self, worker: int) -> str:
        """Describe the batch that a worker is reading; return "" if it is unknown."""
        at = None if self.progress is None else self.progress.of(worker)
        if not at:
            return ""
        place = f"in batch {at[0]}" if self.split is None else f"after {at[0]} items"
        return f" {place} of epoch {int(self.place[0])}"

    def __iter__(self) -> Iterator[Any]:
        # Read the place now: with persistent workers, the next pass overwrites it.
        epoch, first_batch, keeps = self.place.tolist()
        info = get_worker_info()
        # Another simulated rank may have set `_worker_info` for another data set, although this
        # process is not a worker.
        if info is not None and info.dataset is not self:
            info = None
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        if self.split is None:
            stream = Stream(
                self.data,
                epoch,
                seed=self.seed,
                keeps=bool(keeps),
                in_worker=info is not None,
                num_hashed=NUM_HASHED if worker == 0 else 0,
            )
            numbers: Iterator[int] = count(first_batch + worker, num_workers)
            batches = self._of_stream(stream, first_batch + worker, num_workers)
        else:
            reader = self.rank * self.split.readers_per_rank + worker
            stream = self._shard(epoch, reader, keeps=bool(keeps), in_worker=info is not None)
            numbers = iter(lambda: stream.num_read, None)
            # While all n workers have batches, the k-th batch of worker w has number w + n * k in
            # the pass. So do not make the batches before `first_batch`. Once another worker has
            # ended, the number is smaller, and `until_all_end` drops a batch that comes before
            # `first_batch`.
            batches = self._of_shard(stream, -(-(first_batch - worker) // num_workers))
        return batches if info is None else self._recorded(batches, numbers)

    def _of_stream(self, stream: Stream, first_batch: int, stride: int) -> Iterator[Any]:
        """Yield batches, then an `End`.

        Once the first items are hashed, one batch is `Noted` with their hashes.
        """
        parts = parts_of_stream(stream, self.cut, self.rank, first_batch=first_batch, stride=stride)
        batches = map(self.collate_fn, parts)
        for batch in batches:
            if len(stream.hashes) == NUM_HASHED:
                yield Noted(batch, stream.hashes)
                break
            yield batch
            # Free the batch before the next one is read.
            del batch
        yield from batches
        yield End(stream.num_read)

    def _shard(self, epoch: int, reader: int, *, keeps: bool, in_worker: bool) -> Stream:
        """Start one pass over a reader's shard."""
        assert self.split is not None
        data, info = self.data, None
        seed, num_readers = mix(self.seed + reader + 1), self.split.num_readers
        if self.split.kind == "shard":
            data = shard_of(data, num_readers, reader)
        else:
            worker_seed = torch.initial_seed() if in_worker else seed
            info = WorkerInfo(id=reader, num_workers=num_readers, seed=worker_seed, dataset=data)
        return Stream(data, epoch, seed=seed, keeps=keeps, info=info, in_worker=in_worker)

    def _of_shard(self, stream: Stream, num_dropped: int) -> Iterator[Any]:
        """Yield a shard's batches, with None for the first `num_dropped`.

        The first one is `Noted` with an item of the shard.
        """
        size = part_sizes(self.cut.batch_size, self.cut.world_size)[self.rank]
        for number, part in enumerate(parts_of_shard(stream, size, drop_last=self.cut.drop_last)):
            example = _packed(part[:1]) if number == 0 else None
            batch = None if number < num_dropped else self.collate_fn(part)
            yield Noted(batch, example) if number == 0 else batch

    def _recorded(self, batches: Iterator[Any], numbers: Iterator[int]) -> Iterator[Any]:
        """Yield the batches; while the worker reads one, record its number from `numbers`."""
        assert self.progress is not None
        for number in numbers:
            self.progress.begin(number)
            # `self` stands for the end, since no batch is this object.
            batch = next(batches, self)
            self.progress.end()
            if batch is self:
                return
            yield batch


def _packed(items: list[Any]) -> bytes | None:
    """Pickle items; return None if this fails, since only a rank without items needs them."""
    try:
        # Copy each tensor: a view would be pickled with its whole storage.
        return pickle.dumps(map_tensors(lambda tensor: tensor.detach().clone(), items))
    except Exception:
        return None


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """Calls the user's worker_init_fn while `get_worker_info` shows the user's data set."""

    fn: Callable[[int], None]
    # The number of this rank's first worker, among the workers of all ranks that split the stream.
    first: int | None = None
    # The number of workers that split the stream.
    num_workers: int = 1

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
    """Select the options of a user's DataLoader that our DataLoader over a `PartStream` uses, too."""
    kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if kept["worker_init_fn"] is not None:
        kept["worker_init_fn"] = init(kept["worker_init_fn"])
    return kept


class _StreamPool(WorkerPool):
    """Workers that read a `PartStream`, from the place that each pass writes to shared memory."""

    def __init__(self, stream_of: Callable[[Tensor], PartStream], options: dict[str, Any]) -> None:
        self.place = torch.zeros(3, dtype=torch.int64)
        if options["persistent_workers"]:
            self.place.share_memory_()  # type: ignore[no-untyped-call]
        stream = stream_of(self.place)
        if options["num_workers"]:
            stream.progress = WorkerProgress(options["num_workers"])
        super().__init__(make_loader(stream, **options), stream.where)


class Passes:
    """Passes over a `PartStream`. Each pass starts at a place: [epoch, first batch, keeps], int64.

    Every pass has its own workers. Persistent workers serve one pass after the other, and read
    the place from shared memory. If the user gave no generator, workers are seeded by seed
    and epoch: torch would draw from the global generator at every pass.
    """

    def __init__(
        self, stream_of: Callable[[Tensor], PartStream], options: dict[str, Any], seed: int
    ) -> None:
        self._seed = seed
        self._own = torch.Generator()
        options = {**options, "generator": options.get("generator") or self._own}
        make = partial(_StreamPool, stream_of, options)
        self.pools = IdlePools(make, options["persistent_workers"])

    def start(self, epoch: int, first_batch: int, *, keeps: bool = False) -> Iterator[Any]:
        """Return an iterator of items from a batch on. Its workers start now, not with the first item."""
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
