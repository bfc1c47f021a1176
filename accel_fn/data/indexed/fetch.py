"""One batch by the numbers of its samples: a single read where the data set allows it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
)

from accel_fn.core.given_batches import Origin
from accel_fn.core.split_batch import part_bounds
from accel_fn.data.collate import Collate, ReadyBatch, WholeBatch, stacks_plainly
from accel_fn.data.empty_part import EmptyPart, twice, without_rows
from accel_fn.data.random_generators import seed_process
from accel_fn.data.sample_seeds import reading
from accel_fn.data.set_epoch import InEpoch, may_hold_samples, reached_from
from accel_fn.data.workers import WorkerProgress

_SHOWN = 8  # samples that an error lists
_KEPT = 8
"""Most samples that are read again for a check."""


@dataclass(frozen=True, slots=True)
class Part:
    """The samples of a batch, and the epoch that they are read in."""

    epoch: int
    batch: int
    """The number of the batch in the epoch."""
    numbers: Any
    """A tensor or list: samples of this rank. Anything else: the key of a whole batch."""
    seed: int | None = None
    """Seed of the global random generators; None: they are not seeded."""
    keeps: bool = False
    """Is `set_epoch` not called, so that the data set stays in the epoch that it is in?"""

    @property
    def is_split(self) -> bool:
        """Does each rank have its own samples of the batch?"""
        return isinstance(self.numbers, Tensor | list)

    def listed(self) -> Part:
        """Convert a tensor to a list, which costs less to send to another process."""
        numbers = self.numbers
        return replace(self, numbers=numbers.tolist() if isinstance(numbers, Tensor) else numbers)


class Fetcher(Dataset[Any]):
    """Reads and collates the samples of a batch, as torch's DataLoader would.

    To the DataLoader whose workers run it, it is a data set whose items are batches.
    Workers record the number of the batch, and the place of the sample in it.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.progress: WorkerProgress | None = None
        self._collate: Collate | WholeBatch = Collate(collate_fn)
        self._reads_rows = stacks_plainly(collate_fn) and has_rows(dataset)
        self._reads_many = _gives_many(dataset)
        self._inside: InEpoch | None = None
        """The context of the epoch of the last batch."""

    def of_pass(self) -> Fetcher:
        """Make a copy that calls `set_epoch` anew: the loop may call it between two passes."""
        return copy.copy(self)

    def recording(self, progress: WorkerProgress) -> Fetcher:
        """Make a copy for workers, which record what they read."""
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
        # No code of the user's runs to read rows, so none needs the epoch or a seed.
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

    def origin(self, part: Part) -> Origin | None:
        """Return what makes the batch of a part of a few of its samples; None where rows are samples."""
        is_empty = isinstance(part.numbers, EmptyPart) or not part.is_split
        if is_empty or stacks_plainly(self.collate_fn):
            return None
        return Origin(len(part.numbers), partial(self._some, part), self.collate_fn)

    def own(self, numbers: list[Any]) -> list[Any]:
        """Return this rank's samples of those that it reads."""
        return numbers

    def _some(self, part: Part) -> list[Any]:
        numbers = part.listed().numbers[:_KEPT]
        with reading(part.epoch):
            return list(self._samples(numbers))

    def fetch(self, numbers: Tensor | list[Any]) -> Any:
        """Return the batch of samples `numbers`: int64, or whatever else the data set is indexed by.

        An exception of the data set's gets a note that names the sample.
        """
        if self._reads_rows:
            try:
                if not isinstance(numbers, Tensor):
                    numbers = _places(numbers, len(self.dataset))
                return rows(self.dataset, numbers)
            except _NotPlacesError:
                # Sample by sample, a negative number works, and an error names its sample.
                pass
        if isinstance(numbers, Tensor):
            numbers = numbers.tolist()
        return self._collated(self._samples(numbers), numbers)

    def _empty(self, numbers: list[Any]) -> Any:
        """Return the batch of no samples, in the form of that of one."""
        samples = self._samples(numbers)
        # A data set that reads many at once may give anything, which cannot be doubled.
        two = twice(samples) if isinstance(samples, list) else self._samples(numbers * 2)
        with _noting(
            f"collate_fn failed on sample {listed(numbers)}, whose form an empty part takes"
        ):
            assert isinstance(self._collate, Collate)  # whole batches have samples
            return self._collate.empty(samples, two)

    def _samples(self, numbers: list[Any]) -> Any:
        number: Any = listed(numbers)
        try:
            if self._reads_many:
                return self.dataset.__getitems__(numbers)
            samples = []
            # A loop, not a list comprehension: an error names the sample that was being read.
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


class WholeFetcher(Fetcher):
    """Reads and collates all samples of a batch, and takes this rank's rows."""

    def __init__(
        self, dataset: Any, collate_fn: Callable[[Any], Any], rank: int, world_size: int
    ) -> None:
        super().__init__(dataset, collate_fn)
        self._place = rank, world_size
        self._collate = WholeBatch(Collate(collate_fn), rank, world_size)

    def origin(self, part: Part) -> Origin | None:
        """Return None: collate_fn sees the same samples on every rank."""
        return None

    def own(self, numbers: list[Any]) -> list[Any]:
        rank, world_size = self._place
        start, stop = part_bounds(len(numbers), world_size, rank)
        return numbers[start:stop]


class ReadyFetcher(Fetcher):
    """Reads batches that the data set has ready: one by its key, or the rows of a list of indices.

    With `collates_whole`, a list holds the indices of all ranks.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        rank: int,
        world_size: int,
        *,
        collates_whole: bool,
    ) -> None:
        super().__init__(dataset, collate_fn)
        self._reads_rows = False
        self._collates_whole = collates_whole
        self._ready = ReadyBatch(collate_fn, rank, world_size)

    def _empty(self, numbers: list[Any]) -> Any:
        return without_rows(self.fetch([*numbers]), self.fetch([*numbers] * 2))

    def origin(self, part: Part) -> Origin | None:
        """Return None: a data set that has batches ready has no samples."""
        return None

    def fetch(self, numbers: Any) -> Any:
        """Return this rank's rows of the batch; a list holds those of this rank alone, or of all."""
        if isinstance(numbers, Tensor):
            numbers = numbers.tolist()
        with _noting(f"the data set failed to give batch {listed(numbers)}"):
            item = self.dataset[numbers]
        is_own = isinstance(numbers, list) and not self._collates_whole
        return self._ready.collate_fn(item) if is_own else self._ready([item])


@contextmanager
def _noting(note: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"shard_loader: {note}")
        raise


def _gives_many(dataset: Any) -> bool:
    """Does the data set read many samples in one call? A `Subset` does if its data set does."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


def listed(numbers: Any) -> str:
    """Describe samples: the first numbers, and how many there are; or one key."""
    if not isinstance(numbers, list):
        return str(numbers)
    more = f", ... {len(numbers)} in all" if len(numbers) > _SHOWN else ""
    return f"{', '.join(map(str, numbers[:_SHOWN]))}{more}"


def has_rows(dataset: Any) -> bool:
    """Can `rows` read the data set? Exact types only, since a subclass may index in its own way."""
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
    """Does torch have a dtype for these numbers?"""
    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):
        return False
    return True


def rows(dataset: Any, numbers: Tensor) -> Any:
    """Read samples [num_samples], int64, as `default_collate` joins them, into new memory."""
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
    """Raised if some keys of samples are not numbers in 0 .. size - 1."""


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
    """Convert integers in 0 .. size - 1 to a tensor [num_values], int64."""
    try:  # NumPy reads a list in a quarter of torch's time
        places = values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values))
    except (TypeError, ValueError) as error:
        raise _NotPlacesError from error
    if places.ndim != 1 or places.dtype not in (torch.int64, torch.int32):
        raise _NotPlacesError
    lowest, highest = places.aminmax()
    if int(lowest) < 0 or int(highest) >= size:
        raise _NotPlacesError
    return places.to(torch.int64)
