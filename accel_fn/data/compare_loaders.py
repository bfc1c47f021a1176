"""Compare the loaders and data sets of all ranks, as far as that is cheap."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import ConcatDataset, DataLoader, Subset, SubsetRandomSampler

from accel_fn.core.collectives import all_or_none
from accel_fn.core.primitives import exchange
from accel_fn.core.state import DistState
from accel_fn.data.indexed import SamplerBatches, nested_samplers
from accel_fn.data.order import length_of
from accel_fn.errors import check_equal

# The indices of a Hugging Face data set may be many and lie in a file, so ranks compare only this
# many at each end.
_ENDS = 4096

Options = TypeVar("Options")


def same_on_all_ranks(
    read: Callable[[], Options], loader: DataLoader[Any], state: DistState
) -> Options:
    """Read a loader's options; all ranks raise if one of them fails, or if options or data sets differ."""
    if state.group is None:
        return read()
    options = all_or_none(read, state, "shard_loader")
    shown = _described(loader, options) if isinstance(options, SamplerBatches) else options
    found = exchange((shown, _checksum(loader.dataset)), state, "shard_loader")
    loaders, samples = zip(*found, strict=True)
    check_equal(loaders, "shard_loader: loader must be the same on every rank")
    check_equal(
        [f"samples of checksum {each}" for each in samples],
        "shard_loader: data set must be the same on every rank",
        "give every rank the whole (and random_split or shuffle() one seed): shard_loader splits it",
    )
    return options


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """Options that must be the same on all ranks of a loader whose sampler rank 0 runs.

    Workers read ahead the samples that rank 0 sends, so all ranks must read equally far ahead.
    """

    samplers: tuple[str, ...]
    num_samples: int | None
    batch_size: int | None
    drop_last: bool | None
    length: int | None
    checksum: int | None
    num_workers: int
    prefetch_factor: int | None
    read_at_once: int | None
    collates_whole: bool


def _described(loader: DataLoader[Any], sampling: SamplerBatches) -> SamplerOptions:
    """Describe this rank's loader, for a comparison over ranks."""
    samplers = nested_samplers(sampling.batch_sampler)
    # Rank 0's list is used, so a sample that only another rank's list holds would be lost. Compare
    # the lists too.
    checksum = _of_list(samplers[-1])
    if type(samplers[-1]) is SubsetRandomSampler:
        checksum = _of_numbers(samplers[-1].indices)
    return SamplerOptions(
        samplers=tuple(type(each).__name__ for each in samplers),
        num_samples=length_of(loader.dataset),
        batch_size=getattr(samplers[0], "batch_size", None),
        drop_last=getattr(samplers[0], "drop_last", None),
        length=sampling.length if sampling.cut is None else sampling.cut.num_samples,
        checksum=checksum,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        read_at_once=sampling.at_once,
        collates_whole=sampling.collates_whole,
    )


def _checksum(dataset: Any) -> int | None:
    """Return a checksum, equal on ranks with the same samples; None for a data set of an unknown kind.

    It covers all indices of a `Subset`, at any depth; the first and last rows and indices of a
    Hugging Face data set; the shards of a Hugging Face stream and the generators that shuffle it.
    It reads no other data, since ranks may hold copies that differ, such as random numbers.
    """
    if isinstance(dataset, Subset):
        return _mixed(_of_numbers(dataset.indices), _checksum(dataset.dataset))
    if isinstance(dataset, ConcatDataset):
        return _mixed(*map(_checksum, dataset.datasets))
    if type(dataset).__module__.startswith("datasets.") and hasattr(dataset, "_indices"):
        return _mixed(_ends(dataset.data, 1), _ends(dataset._indices, _ENDS))
    if type(dataset).__module__.startswith("datasets.") and hasattr(dataset, "_ex_iterable"):
        return zlib.crc32(repr(list(_constants(dataset._ex_iterable))).encode())
    return None


def _constants(part: Any) -> Iterator[Any]:
    """Yield the values that define a Hugging Face stream, but not the state of a pass over it."""
    yield type(part).__name__
    for name, value in sorted(vars(part).items()):
        if isinstance(value, np.random.Generator):
            yield value.bit_generator.state
        elif isinstance(value, bool | int | float | str):
            yield value
        elif name == "kwargs":
            yield [(key, [*map(_shard, each)]) for key, each in value.items() if type(each) is list]
        elif name.startswith("ex_iterable"):
            for each in value if isinstance(value, list) else [value]:
                yield from _constants(each)


def _shard(shard: Any) -> Any:
    """Identify a shard: a file by its name only, since its folder may differ between machines."""
    if isinstance(shard, str):
        return shard.rpartition("/")[2]
    return shard if isinstance(shard, bool | int | float | range) else _checksum(shard)


def _of_list(sampler: Any) -> int | None:
    """Return a checksum of a sampler that is a list or range of samples or batches; None for others."""
    # Hash the repr of a range: the range may be long, and its repr is short.
    if isinstance(sampler, range):
        return zlib.crc32(repr(sampler).encode())
    if not isinstance(sampler, list | tuple):
        return None
    batches = [each if isinstance(each, list | tuple | range) else [each] for each in sampler]
    numbers = np.asarray([*chain.from_iterable(batches)])
    # Sort the samples: rank 0's list alone determines their order.
    return _of_numbers(np.sort(numbers) if numbers.dtype.kind in "iu" else numbers)


def _of_numbers(numbers: Any) -> int:
    """Compute a checksum of integers, or of other keys of samples."""
    try:
        found = np.asarray(numbers)
    except (TypeError, ValueError):
        # The keys are not an array of numbers, or they are on another device: hash their repr
        # below.
        found = np.empty(0)
    if found.dtype.kind in "iu":
        return zlib.crc32(found.astype(np.int64).tobytes())
    return zlib.crc32(repr(list(numbers)).encode())


def _ends(table: Any, count: int) -> int | None:
    """Compute a checksum of the first and last rows of an Arrow table.

    Ranks compare the number of rows among their options.
    """
    if table is None or not len(table):
        return None
    count = min(count, len(table))
    parts = [table.slice(start, count).to_pydict() for start in (0, len(table) - count)]
    return zlib.crc32(repr(parts).encode())


def _mixed(*checksums: int | None) -> int | None:
    if all(each is None for each in checksums):
        return None
    return zlib.crc32(repr(checksums).encode())
