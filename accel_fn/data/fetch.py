"""Read batches by the numbers of their samples, in this process or in a loader's workers."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data._utils import worker as _torch_worker
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data._utils.worker import WorkerInfo

from accel_fn.core.given_batches import Made, Origin, mark
from accel_fn.core.split_batch import part_bounds
from accel_fn.data.collate import (
    Collate,
    EmptyPart,
    ReadyBatch,
    WholeBatch,
    stacks_plainly,
    twice,
    without_rows,
)
from accel_fn.data.loader import Numbered
from accel_fn.data.order import mix
from accel_fn.data.random_generators import seed_process
from accel_fn.data.sample_seeds import reading
from accel_fn.data.set_epoch import InEpoch, LoopEpochs, may_hold_samples, reached_from
from accel_fn.data.workers import (
    WORKER_OPTIONS,
    IdlePools,
    WorkerPool,
    WorkerProgress,
    make_loader,
    worker_error,
)

# The most samples that an error lists.
_SHOWN = 8
_KEPT = 8
"""A check that reads samples of a batch again reads at most this many."""
_NUM_MARKED = 100
"""The number of batches at the start of a pass that get a mark, by which checks read their samples
again. The checks look at the 1st, 2nd, 10th and 100th batch."""


class BatchReader:
    """Reads batches by the data set, collate_fn, pinning and workers of a user's loader, in a given order.

    With `collates_whole`, it reads the samples of all ranks, and takes this rank's rows of their
    batch.
    """

    def __init__(
        self, loader: DataLoader[Any], rank: int, world_size: int, *, collates_whole: bool
    ) -> None:
        # With `collates_whole`, all ranks collate the same batch, so all use the random numbers of
        # rank 0.
        self._rank = 0 if collates_whole else rank
        data, collate_fn, place = loader.dataset, loader.collate_fn, (rank, world_size)
        whole = place if collates_whole else None
        if loader.batch_sampler is None:
            self._fetcher: Fetcher = ReadyFetcher(data, collate_fn, place, whole)
        else:
            self._fetcher = Fetcher(data, collate_fn, whole)
        self._loop_epochs = LoopEpochs(loader.dataset, may_hold_samples)
        self._pins = loader.pin_memory and _can_pin()
        kept = {name: getattr(loader, name) for name in WORKER_OPTIONS}
        self._options: dict[str, Any] = {**kept, "pin_memory": self._pins}
        self._pools = IdlePools(
            partial(_PartWorkers, self._fetcher, self._options), loader.persistent_workers
        )

    def batches(
        self,
        parts: Iterable[Any],
        *,
        epoch: int | None,
        first_batch: int,
        seed: int,
        by_loop: bool,
    ) -> Iterator[Any]:
        """Yield the batch of each part, in order. Workers start when the first batch is taken.

        With `by_loop`, the data set keeps an epoch that the loop has set since the last pass.

        A part is a tensor [num_samples], int64, a list of keys of the data set, or an `EmptyPart`.
        If the data set has batches ready, a part may be the key of one, which all ranks read.
        Workers' random generators are seeded for each batch; with a `worker_init_fn`, only for each
        pass.
        """
        read = self._with_parts(parts, epoch, first_batch, seed, by_loop=by_loop)
        return (batch for _, batch in read)

    def numbered(
        self, parts: Iterable[Any], *, epoch: int | None, first_batch: int, seed: int
    ) -> Iterator[Numbered[Any]]:
        """Yield each batch with the numbers of its samples; with None if the data set has it ready."""
        for part, batch in self._with_parts(parts, epoch, first_batch, seed, by_loop=False):
            numbers = self._fetcher.own(part)
            if isinstance(numbers, Tensor):
                numbers = numbers.tolist()
            yield numbers if isinstance(numbers, list) else None, batch

    def _with_parts(
        self, parts: Iterable[Any], epoch: int | None, first_batch: int, seed: int, *, by_loop: bool
    ) -> Iterator[tuple[Part, Any]]:
        """Yield each part and its batch; mark the first batches, so that checks can read samples again."""
        keeps = epoch is None or (by_loop and self._loop_epochs.are_set())
        epoch = epoch or 0
        seed = mix(mix(seed) + epoch)
        # Two seeds: all ranks read a ready batch with rank 0's random numbers, and each rank reads
        # its part with its own.
        seeds = [mix(mix(seed + rank)) for rank in (0, self._rank)]
        # Do not seed each batch if a worker_init_fn may have seeded the workers.
        has_seeds = self._options["num_workers"] and self._options["worker_init_fn"] is None
        # Workers take parts ahead of time: remember the parts until their batches arrive.
        taken: deque[Part] = deque()

        def of_epoch() -> Iterator[Part]:
            for batch, numbers in enumerate(parts, first_batch):
                part = Part(epoch, batch, numbers, keeps=keeps)
                if has_seeds:
                    part = replace(part, seed=mix(seeds[part.is_split] + batch))
                taken.append(part)
                yield part

        return self._read(of_epoch(), taken, epoch, first_batch, mix(seed + self._rank))

    def _read(
        self, parts: Iterator[Part], taken: deque[Part], epoch: int, first_batch: int, seed: int
    ) -> Iterator[tuple[Part, Any]]:
        pool, number, failed = None, first_batch, False
        if self._options["num_workers"]:
            pool = self._pools.take()
            batches = pool.read(parts, seed)
        else:
            fetcher = self._fetcher.of_pass()
            # Use a generator: it turns a StopIteration of the data set into an error. With `map`, the
            # StopIteration would silently end the epoch.
            batches = (fetcher[part] for part in parts)
            if self._pins:
                batches = map(pin_memory, batches)
        try:
            for batch in batches:
                part = taken.popleft()
                if number - first_batch < _NUM_MARKED and part.is_split:
                    mark(batch, self._fetcher.made(part))
                yield part, batch
                number += 1
        except Exception as error:
            failed = True
            where = f"batch {number} of epoch {epoch}"
            if pool is not None and (lost := pool.lost(after=error)):
                raise worker_error(lost, f" while {where} was waited for") from error
            error.add_note(f"shard_loader: {where}")
            raise
        finally:
            if pool is not None:
                self._pools.give_back(pool, failed=failed)


def _can_pin() -> bool:
    """Return whether there is an accelerator to which pinned memory speeds up copies."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type != "mps"


class _PartWorkers(WorkerPool):
    """Worker processes that read the batch of each part."""

    def __init__(self, fetcher: Fetcher, options: dict[str, Any]) -> None:
        progress = WorkerProgress(options["num_workers"])
        self._parts = _PartSampler(progress)
        self._generator = torch.Generator()
        loader = make_loader(
            fetcher.recording(progress),
            sampler=self._parts,
            generator=self._generator,
            **{**options, "worker_init_fn": _InitWithUsersDataSet(options["worker_init_fn"])},
        )
        super().__init__(loader, self._parts.where)

    def read(self, parts: Iterable[Part], seed: int) -> Iterator[Any]:
        """Yield the batch of each part, in order; workers take parts ahead of time."""
        self._parts.start(parts)
        self._generator.manual_seed(seed)
        self.start()
        for batch in self.items():
            self._parts.forget_oldest()
            yield batch

    def drop_rest(self) -> None:
        # Without parts, workers read no more batches. torch drops the batches that they still send.
        self._parts.start(())


class _PartSampler(Sampler[Any]):
    """Yields the parts of a pass to torch's loader, and keeps each until its batch is read."""

    def __init__(self, progress: WorkerProgress) -> None:
        self._progress = progress
        self.pending: dict[int | None, Part] = {}
        """The parts that the loader has taken, but whose batches it has not returned yet: by batch
        number, the oldest first."""
        self.start(())

    def start(self, parts: Iterable[Part]) -> None:
        self._parts = iter(parts)
        self.pending.clear()

    def forget_oldest(self) -> None:
        del self.pending[next(iter(self.pending))]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        part = next(self._parts).listed()
        self.pending[part.batch] = part
        return part

    def where(self, worker: int) -> str:
        """Describe the samples that a worker is reading; return "" if they are unknown."""
        number, place = self._progress.of(worker) or (None, -1)
        part = self.pending.get(number)
        if part is None:
            return ""
        numbers: Any = part.numbers
        samples = f"sample {numbers[place]}" if place >= 0 else f"samples {listed(numbers)}"
        return f" in {samples} of batch {number} of epoch {part.epoch}"


@dataclass(frozen=True, slots=True)
class _InitWithUsersDataSet:
    """Makes `get_worker_info` return the user's data set, then calls the user's worker_init_fn."""

    fn: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        data: Any = info.dataset
        # `get_worker_info` reads a private global of torch; there is no public way to set it.
        _torch_worker._worker_info = WorkerInfo(
            id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=data.dataset
        )
        if self.fn is not None:
            self.fn(worker)


@dataclass(frozen=True, slots=True)
class Part:
    """The samples of a batch, and the epoch in which they are read."""

    epoch: int
    batch: int
    """The number of the batch in the epoch."""
    numbers: Any
    """A tensor or list of the samples that this rank reads, or the key of a whole batch."""
    seed: int | None = None
    """The seed of the global random generators; None if they are not seeded."""
    keeps: bool = False
    """Whether to leave the data set in its current epoch, without a call of `set_epoch`."""

    @property
    def is_split(self) -> bool:
        """Return whether the part lists samples, and is not the key of a whole batch."""
        return isinstance(self.numbers, Tensor | list)

    def listed(self) -> Part:
        """Convert a tensor to a list, which costs less to send to another process."""
        numbers = self.numbers
        return replace(self, numbers=numbers.tolist() if isinstance(numbers, Tensor) else numbers)


class Fetcher(Dataset[Any]):
    """Reads and collates the samples of a batch, as torch's DataLoader would.

    If workers run the fetcher, their DataLoader treats the fetcher as a data set of batches. Workers
    record the number of the batch that they read, and the place of the sample in the batch.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[Any], Any], whole: tuple[int, int] | None = None
    ) -> None:
        """With `whole`, (rank, world size), collate all ranks' samples, and take this rank's rows."""
        self.dataset = dataset
        self._whole = whole
        self.collate_fn = collate_fn
        self.progress: WorkerProgress | None = None
        collate = Collate(collate_fn)
        self._collate: Collate | WholeBatch = (
            collate if whole is None else WholeBatch(collate, *whole)
        )
        self._reads_rows = stacks_plainly(collate_fn) and has_rows(dataset)
        self._reads_many = _gives_many(dataset)
        self._inside: InEpoch | None = None
        """The context in which the last part was read; None before the first part."""

    def of_pass(self) -> Fetcher:
        """Make a copy for a new pass, which calls `set_epoch` again: the loop may have called it since."""
        return copy.copy(self)

    def recording(self, progress: WorkerProgress) -> Fetcher:
        """Make a copy for workers that records their progress."""
        found = copy.copy(self)
        found.progress = progress
        return found

    def __getitem__(self, part: Part) -> Any:
        """Return the batch of the samples of a part."""
        if self.progress is None:
            return self._read(part)
        self.progress.begin(part.batch)
        found = self._read(part)
        self.progress.end()
        return found

    def _read(self, part: Part) -> Any:
        # Rows of tensors are read without the user's code, so set neither epoch nor seed.
        is_empty = type(part.numbers) is EmptyPart
        if self._reads_rows and not is_empty:
            return self.fetch(part.numbers)
        if part.seed is not None:
            seed_process(part.seed)
        epoch = None if part.keeps else part.epoch
        if self._inside is None or self._inside.epoch != epoch:
            in_worker = self.progress is not None
            readers = reached_from(self.dataset, may_hold_samples)
            self._inside = InEpoch(readers, epoch, alone=in_worker)
        with reading(part.epoch), self._inside:
            return self._empty(part.numbers) if is_empty else self.fetch(part.numbers)

    def own(self, part: Part) -> Any:
        """Return this rank's samples in a part, or the key of a whole ready batch."""
        if isinstance(part.numbers, EmptyPart):
            return []
        if self._whole is None or not part.is_split:
            return part.numbers
        start, stop = part_bounds(len(part.numbers), self._whole[1], self._whole[0])
        return part.numbers[start:stop]

    def made(self, part: Part) -> Made:
        """Return the mark of a part's batch: an `Origin` if checks can collate its samples again."""
        num_samples = len(self.own(part))
        if num_samples == 0 or self._whole is not None or stacks_plainly(self.collate_fn):
            return Made(num_samples)
        return Origin(num_samples, partial(self._some, part), self.collate_fn)

    def _some(self, part: Part) -> list[Any]:
        numbers = part.listed().numbers[:_KEPT]
        with reading(part.epoch):
            return list(self._samples(numbers))

    def fetch(self, numbers: Tensor | list[Any]) -> Any:
        """Return the batch of the samples `numbers`: int64, or other keys of the data set.

        An exception of the data set gets a note that names the sample.
        """
        if self._reads_rows:
            try:
                if not isinstance(numbers, Tensor):
                    numbers = _places(numbers, len(self.dataset))
                return rows(self.dataset, numbers)
            except _NotPlacesError:
                # Read sample by sample instead: then a negative number is valid, and an error names
                # its sample.
                pass
        if isinstance(numbers, Tensor):
            numbers = numbers.tolist()
        return self._collated(self._samples(numbers), numbers)

    def _empty(self, numbers: list[Any]) -> Any:
        """Read and collate the only sample in `numbers`; return its batch without the row."""
        samples = self._samples(numbers)
        # A data set that reads many samples in one call may return any type. Only a list can be
        # doubled, so otherwise read the sample twice.
        two = twice(samples) if isinstance(samples, list) else self._samples(numbers * 2)
        with _noting(
            f"collate_fn failed on sample {listed(numbers)}, whose form an empty part takes"
        ):
            # A part is never empty if every rank collates whole batches.
            assert isinstance(self._collate, Collate)
            return self._collate.empty(samples, two)

    def _samples(self, numbers: list[Any]) -> Any:
        number: Any = listed(numbers)
        try:
            if self._reads_many:
                return self.dataset.__getitems__(numbers)
            samples = []
            # Use a loop, not a list comprehension: an error names the sample that was being read.
            for place, number in enumerate(numbers):
                if self.progress is not None:
                    self.progress.at(place)
                samples.append(self.dataset[number])
            return samples
        except Exception as error:
            error.add_note(f"shard_loader: the data set failed to give sample {number}")
            raise

    def _collated(self, samples: Any, numbers: list[Any]) -> Any:
        with _noting(f"collate_fn failed on samples {listed(numbers)}"):
            return self._collate(samples, len(numbers))


class ReadyFetcher(Fetcher):
    """Reads from a data set that returns batches: a whole batch by its key, or rows by their indices."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        place: tuple[int, int],
        whole: tuple[int, int] | None,
    ) -> None:
        super().__init__(dataset, collate_fn, whole)
        self._reads_rows = False
        self._ready = ReadyBatch(collate_fn, *place)

    def _empty(self, numbers: list[Any]) -> Any:
        return without_rows(self.fetch([*numbers]), self.fetch([*numbers] * 2))

    def made(self, part: Part) -> Made:
        """Return the number of rows; a data set with ready batches has no samples to read again."""
        return Made(len(self.own(part)))

    def fetch(self, numbers: Any) -> Any:
        """Return this rank's rows. Indices in a list are this rank's, or with `whole` those of all ranks."""
        if isinstance(numbers, Tensor):
            numbers = numbers.tolist()
        with _noting(f"the data set failed to give batch {listed(numbers)}"):
            item = self.dataset[numbers]
        is_own = isinstance(numbers, list) and self._whole is None
        return self._ready.collate_fn(item) if is_own else self._ready([item])


@contextmanager
def _noting(note: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"shard_loader: {note}")
        raise


def _gives_many(dataset: Any) -> bool:
    """Return whether the data set inside all `Subset`s reads many samples in one call, by `__getitems__`."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


def listed(numbers: Any) -> str:
    """Describe samples: the first numbers and the count; or a single key."""
    if not isinstance(numbers, list):
        return str(numbers)
    more = f", ... {len(numbers)} in all" if len(numbers) > _SHOWN else ""
    return f"{', '.join(map(str, numbers[:_SHOWN]))}{more}"


def has_rows(dataset: Any) -> bool:
    """Return whether `rows` can read the data set; False for subclasses, which may read it differently."""
    kind = type(dataset)
    if kind is Tensor:
        return (
            dataset.ndim > 0
            and dataset.layout is torch.strided
            and not (dataset.is_nested or dataset.is_quantized)
        )
    if kind is TensorDataset:
        return all(map(has_rows, dataset.tensors))
    if kind is Subset:
        return has_rows(dataset.dataset)
    if kind is StackDataset:
        return all(map(has_rows, _columns(dataset)))
    return kind in (np.ndarray, np.memmap) and dataset.ndim > 0 and _is_known(dataset.dtype)


def _columns(dataset: StackDataset[Any]) -> list[Any]:
    parts = dataset.datasets
    return list(parts.values() if isinstance(parts, Mapping) else parts)


def _is_known(dtype: np.dtype[Any]) -> bool:
    """Return whether torch has this NumPy dtype."""
    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):
        return False
    return True


def rows(dataset: Any, numbers: Tensor) -> Any:
    """Read the samples `numbers`, [num_samples], int64, into new tensors, as `default_collate` joins them."""
    kind = type(dataset)
    if kind is TensorDataset:
        return [rows(tensor, numbers) for tensor in dataset.tensors]
    if kind is Tensor:
        return dataset.index_select(0, numbers.to(dataset.device))
    if kind is Subset:
        return rows(dataset.dataset, _mapped(dataset, numbers))
    if kind is StackDataset:
        if isinstance(dataset.datasets, Mapping):
            return {name: rows(part, numbers) for name, part in dataset.datasets.items()}
        return [rows(part, numbers) for part in dataset.datasets]
    return torch.from_numpy(dataset[numbers.numpy()])


class _NotPlacesError(Exception):
    """Raised if some keys of samples are not integers in 0 .. size - 1, the numbers of rows."""


def _mapped(subset: Subset[Any], numbers: Tensor) -> Tensor:
    """Map numbers of a subset to those in the whole data set."""
    indices: Any = subset.indices
    size = len(subset.dataset)  # type: ignore[arg-type]
    if isinstance(indices, Tensor):
        return _places(indices[numbers], size)
    if isinstance(indices, np.ndarray):
        return _places(indices[numbers.numpy()], size)
    return _places([indices[number] for number in numbers.tolist()], size)


def _places(values: Any, size: int) -> Tensor:
    """Convert integers in 0 .. size - 1 to a tensor [num_values], int64; refuse any other values."""
    # NumPy converts a list four times as fast as torch.
    try:
        places = values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values))
    except (TypeError, ValueError) as error:
        raise _NotPlacesError from error
    if places.ndim != 1 or places.dtype not in (torch.int64, torch.int32):
        raise _NotPlacesError
    lowest, highest = places.aminmax()
    if int(lowest) < 0 or int(highest) >= size:
        raise _NotPlacesError
    return places.to(torch.int64)
