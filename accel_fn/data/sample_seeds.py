"""sample_seed and seed_samples: random numbers that depend only on a sample's number and epoch."""

from __future__ import annotations

import operator
import random
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from accel_fn.core.restored import GENERATORS
from accel_fn.core.state import DistState
from accel_fn.data.order import mix
from accel_fn.data.prefetch import Reader
from accel_fn.errors import ArgumentError, ArgumentTypeError, check_count, message

# This constant keeps the seeds of samples different from the keys that shuffle an epoch.
_KIND = 0x73616D706C657321
# The increment of SplitMix64.
_STEP = 0x9E3779B97F4A7C15
_epoch: ContextVar[int] = ContextVar("epoch of the samples that are read")


def sample_seed(state: DistState, epoch: int, index: int) -> int:
    """Compute the seed of one sample in one epoch, for its augmentation. Pure.

    It does not depend on workers, ranks or the order of reading, so that a sample is augmented in
    the same way in any world, and again when a run resumes.

    Args:
        state: only its `seed` is used.
        epoch: the number of the epoch, >= 0.
        index: the number of the sample in its data set, or its place in a stream; >= 0.

    Returns:
        An integer in 0 .. 2**63 - 1, for `torch.Generator().manual_seed`,
        `numpy.random.default_rng` and `random.Random`.

    Raises:
        ValueError: `epoch` or `index` is not an integer >= 0 (also a TypeError if it is not an
            integer).

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".

    >>> import accel_fn as af
    >>> af.data.sample_seed(af.DistState(seed=1), epoch=0, index=7)
    8356948564884291550
    """
    check_count("sample_seed", "epoch", epoch, minimum=0)
    check_count("sample_seed", "index", index, minimum=0)
    return _seed(state.seed, int(epoch), int(index))


def _seed(seed: int, epoch: int, index: int) -> int:
    return mix(mix(mix(seed ^ _KIND) + epoch) + index * _STEP) >> 1


def seed_samples(data: Dataset[Any], state: DistState) -> SeededSamples:
    """Give each sample of a map-style data set its own random numbers, from `sample_seed`.

    While a sample is read, torch's, Python's and NumPy's global generators (on the CPU) are seeded
    for it, and they are restored afterwards. So augmentation that draws from them, as most does, is
    the same for any number of workers and ranks, and differs between samples and epochs. If a
    sampler draws a sample twice in an epoch, both copies are augmented in the same way.

    Args:
        data: a data set with `__len__` and `__getitem__`. Its indices number the samples, even if
            a `Subset` or a data set of your own wraps the result.
        state: only its `seed` is used, which must be the same on every rank.

    Returns:
        A data set for a `DataLoader` for `shard_loader`, which sets the epoch. To read a
        sample by hand, index it by both numbers: `samples[epoch, index]`.

    Raises:
        TypeError: `data` is a stream, or has no `__getitem__`.
        ValueError: (when a sample is read) by an index alone, and not by a sharded loader; or
            by `prefetch` without workers, since its thread would share the generators with
            the loop.

    Law: the random numbers of a sample depend neither on workers, nor on ranks, nor on the reading
    order. Tests: `tests/laws/law08_seeding.py`.

    Cost: a batch is read sample by sample, and Python's, NumPy's and torch's generators are seeded
    for each and put back after each batch.

    >>> import torch, accel_fn as af
    >>> class Noisy(torch.utils.data.Dataset):
    ...     def __len__(self):
    ...         return 6
    ...     def __getitem__(self, index):
    ...         return index + torch.rand(())
    >>> state = af.DistState()
    >>> samples = af.data.seed_samples(Noisy(), state)
    >>> loader = af.shard_loader(torch.utils.data.DataLoader(samples, batch_size=4), state)
    >>> bool(next(iter(loader))[2] == samples[0, 2]), bool(samples[0, 2] == samples[1, 2])
    (True, False)
    """
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        rule, repair = "be a map-style data set", "in a stream, seed generators with sample_seed"
        raise ArgumentTypeError(message("seed_samples", "data", rule, type(data).__name__, repair))
    return SeededSamples(data, state.seed)


class SeededSamples(Dataset[Any]):
    """The user's `data`, each sample read with its own random numbers. Made by `seed_samples`."""

    def __init__(self, data: Dataset[Any], seed: int) -> None:
        self.data = data
        self._run_seed = seed

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        """Return a sample in the epoch that a loader reads, or in the epoch of `[epoch, index]`."""
        if isinstance(index, tuple):
            epoch, index = index
            with reading(check_count("seed_samples", "epoch", epoch, minimum=0)):
                return self[index]
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        """Return samples in the epoch that a loader reads."""
        epoch = _epoch.get(None)
        if epoch is None:
            rule = "be read by a loader that shard_loader made, which sets the epoch"
            repair = "by hand, index it as samples[epoch, index]"
            raise ArgumentError(message("seed_samples", "samples", rule, indices[0], repair))
        with _own_generators():
            return [self._sample(epoch, index) for index in indices]

    def _sample(self, epoch: int, index: Any) -> Any:
        place = operator.index(index)
        if place < 0:
            place += len(self)
        seed = _seed(self._run_seed, epoch, place)
        random.seed(seed)
        np.random.seed((seed & 0xFFFFFFFF, seed >> 32))
        torch.default_generator.manual_seed(seed)
        return self.data[index]


@contextmanager
def reading(epoch: int) -> Iterator[None]:
    """Enter a context in which this thread reads samples of `epoch`."""
    token = _epoch.set(epoch)
    try:
        yield
    finally:
        _epoch.reset(token)


@contextmanager
def _own_generators() -> Iterator[None]:
    """Enter a context in which the caller may seed the global generators; restore them at the end."""
    # Take no lock in a worker: no loop shares its generators, and if the lock was held at the fork,
    # the worker would wait forever.
    alone: AbstractContextManager[Any] = nullcontext()
    if get_worker_info() is None:
        if isinstance(threading.current_thread(), Reader):
            rule = "be >= 1 under prefetch, whose thread shares random generators with the loop"
            raise ArgumentError(message("seed_samples", "num_workers", rule, 0))
        alone = GENERATORS
    with alone:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
