"""The global batches of a user's sampler: a function of seed and epoch.

A sampler of a data set that has batches ready may give the key of one in place of a list of samples.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_fn.data.order import Order, find_by_counting, mix
from accel_fn.data.random_generators import Generators, generators_of
from accel_fn.data.set_epoch import InEpoch, may_sample, reached_from
from accel_fn.errors import ArgumentError, message

_SAMPLES_AT_ONCE = 4096  # one message for so many samples costs little more than for one batch
_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_KNOWN = (*_DRAWING, SequentialSampler, BatchSampler, list, tuple, range)

Batch = Any
"""A list of samples, or the key of a batch that the data set has ready."""


@dataclass(frozen=True, slots=True)
class SamplerBatches:
    """The global batches of every epoch."""

    batch_sampler: Iterable[Any]  # yields the samples of each batch, or its key
    seed: int  # seeds everything that the sampler draws
    cut: Order | None = None  # the cut into batches, if the number of samples is known before
    length: int | None = None  # batches of a batch sampler
    at_once: int | None = None  # batches that are read together; None: some thousand samples
    gives_keys: bool = False  # the data set has batches ready
    collates_whole: bool = False  # every rank collates the samples of all ranks

    @property
    def is_own(self) -> bool:
        """Is one of the samplers of a class of the user's, which the loop may change as it goes?"""
        return any(type(each) not in _KNOWN for each in nested_samplers(self.batch_sampler))

    def facts(self) -> dict[str, int | None]:
        """Return the facts that are known before the sampler runs."""
        return {"seed": self.seed} if self.cut is None else self.cut.facts()

    def num_batches(self) -> int | None:
        """Return the batches of an epoch; None without a length."""
        return self.length if self.cut is None else self.cut.num_batches()

    def batches(self, epoch: int, *, keeps: bool = False) -> Iterator[Batch]:
        """Yield the global batches of an epoch, read `at_once`; the loop may have set that of the sampler."""
        checked = self._checked(self._read(epoch, keeps=keeps), epoch)
        return checked if self.cut is None else self._counted(checked, epoch)

    def position(self, step: int, window: int = 1) -> tuple[int, int]:
        """Return the epoch and the window after `step` windows: computed, or found by running the sampler."""
        if self.cut is not None:
            return divmod(step, -(-self.cut.num_batches() // window))
        return find_by_counting(step, self.batches, window)

    def _read(self, epoch: int, *, keeps: bool) -> Iterator[Batch]:
        """Yield the batches of the sampler, unchanged."""
        seed = mix(mix(self.seed) + epoch)
        sampler = _with_generator(self.batch_sampler, torch.Generator().manual_seed(seed))
        # Entered anew for each read: between two reads the loop uses its own random numbers and epochs.
        readers = reached_from(sampler, may_sample)
        inside = [_generators(sampler, seed), InEpoch(readers, None if keeps else epoch)]
        batches: Iterator[Batch] | None = None
        while True:
            with ExitStack() as stack:
                for context in inside:
                    stack.enter_context(context)
                if batches is None:
                    batches = map(_key if self.gives_keys else plain, iter(sampler))
                several = self.take(batches)
            if not several:
                return
            yield from several

    def take(self, batches: Iterator[Batch]) -> list[Batch]:
        """Return the next batches, as many as are read at once; none at the end."""
        if self.at_once is not None:
            return list(islice(batches, self.at_once))
        found, num_samples = [], 0
        for batch in batches:
            found.append(batch)
            num_samples += len(batch) if isinstance(batch, list) else 1
            if num_samples >= _SAMPLES_AT_ONCE:
                break
        return found

    def _checked(self, batches: Iterator[Batch], epoch: int) -> Iterator[Batch]:
        """Refuse an epoch without a batch, and a batch without a sample."""
        number = -1
        for number, batch in enumerate(batches):
            if isinstance(batch, list) and not batch:
                where = f"none in batch {number} of epoch {epoch}"
                raise ArgumentError(message("shard_loader", "sampler", "give samples", where))
            yield batch
        if number < 0:
            where = f"none in epoch {epoch}"
            raise ArgumentError(message("shard_loader", "sampler", "give samples", where))

    def _counted(self, batches: Iterator[Batch], epoch: int) -> Iterator[Batch]:
        """Refuse more or fewer batches than the length states: positions are computed from it."""
        assert self.cut is not None
        promised, number = self.cut.num_batches(), 0
        for number, batch in enumerate(batches, start=1):
            if number > promised:
                break
            yield batch
        if number != promised:
            rule = f"give as many samples as its len, {self.cut.num_samples}, in every epoch"
            got = f"{'more' if number > promised else 'fewer'} in epoch {epoch}"
            repair = "correct its __len__, or leave it out"
            raise ArgumentError(f"shard_loader: sampler must {rule}, got {got}; {repair}")


def nested_samplers(sampler: Any) -> list[Any]:
    """List a sampler and those inside it, the outermost first."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is each for each in found):
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return found


def _with_generator(sampler: Any, generator: torch.Generator) -> Any:
    """Copy a sampler of torch, so that it draws from `generator`; return any other sampler unchanged."""
    if type(sampler) is BatchSampler:
        inner = _with_generator(sampler.sampler, generator)
        return BatchSampler(inner, sampler.batch_size, sampler.drop_last)
    if type(sampler) in _DRAWING:
        sampler = copy.copy(sampler)
        sampler.generator = generator
    return sampler


def _generators(sampler: Any, seed: int) -> AbstractContextManager[None]:
    """Seed the random generators that a user's sampler may draw from, while the context lasts."""
    foreign = [each for each in nested_samplers(sampler) if type(each) not in _KNOWN]
    if not foreign:
        return nullcontext()
    own = {id(held): held for each in foreign for held in generators_of(each)}
    return Generators(seed, list(own.values()))


def plain(batch: Iterable[Any]) -> list[Any]:
    """Make a list of Python integers, which cost less to send and to use than NumPy's or tensors."""
    return [number if type(number) is int else _number(number) for number in batch]


def _key(key: Any) -> Batch:
    """Return a list of indices for a list, a range or an array; any other key as it is."""
    is_list = isinstance(key, list | range) or getattr(key, "ndim", 0) > 0
    return plain(key) if is_list else _number(key)


def _number(number: Any) -> Any:
    try:
        return operator.index(number)
    except TypeError:  # the data set has other keys
        return number
