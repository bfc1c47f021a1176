"""The way of a user's own sampler: rank 0 runs it and deals every rank its part of each batch."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accel_fn._batch import part_sizes
from accel_fn._channel import Channel
from accel_fn._errors import ArgumentError, ArgumentTypeError, ReplicaError, message
from accel_fn._state import DistState
from accel_fn.data._loading import Loading
from accel_fn.data._order import mix
from accel_fn.data._sampling import Batch, Sampling, take_several

Tell = Callable[[Callable[[], Sequence[Any]]], Any]
"""Takes what computes a value for every rank; gives this rank's."""


class DealtSource:
    """A `Source`: this rank's part of every batch of a sampler that rank 0 runs.

    Without a channel every rank runs it, under the same random numbers.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sampling: Sampling,
        state: DistState,
        channel: Channel | None,
    ) -> None:
        self._loading = Loading(loader)
        self._sampling = sampling
        self._rank = state.rank
        self._world_size = state.world_size
        self._channel = channel

    def num_batches(self) -> int:
        """Batches of an epoch, where the sampler says it."""
        known = self._sampling.num_batches()
        if known is None:
            name = type(self._sampling.batch_sampler).__name__
            repair = "iterate without asking for it, or give the sampler a __len__"
            rule = "have a length to be asked for"
            raise ArgumentTypeError(message("len", "the loader's sampler", rule, name, repair))
        return known

    def batches(self, epoch: int, first_batch: int) -> Iterator[Any]:
        """From batch `first_batch` of an epoch to its end. All ranks go through it together."""
        parts = _parts(self._sampling, self._tell(), self._world_size, epoch, first_batch)
        seed = mix(mix(mix(self._sampling.seed) + epoch) + self._rank)
        return self._loading.batches(parts, epoch=epoch, first_batch=first_batch, seed=seed)

    def locate(self, step: int) -> tuple[int, int]:
        """By arithmetic where the sampler says its length, else by running it: then all ranks call this."""
        if self._sampling.cut is not None:
            return self._sampling.locate(step)
        place: tuple[int, int] = self._tell()(
            lambda: [self._sampling.locate(step)] * self._world_size
        )
        return place

    def indices(self, epoch: int, batch: int) -> Tensor:
        """Of this rank, where it runs the sampler itself."""
        return _numbers(_part(self._batch(epoch, batch), self._rank, self._world_size))

    def global_indices(self, epoch: int, batch: int) -> Tensor:
        """Of all ranks, where this rank runs the sampler itself."""
        return _numbers(self._batch(epoch, batch))

    def _batch(self, epoch: int, batch: int) -> Batch:
        if self._channel is not None:
            name = type(self._sampling.batch_sampler).__name__
            rule = "go through its data in order or with shuffle=True"
            repair = "a sampler of your own is run on rank 0 alone"
            raise ArgumentError(message("indices", "loader", rule, name, repair))
        found = next(islice(self._sampling.batches(epoch), batch, None), None)
        if found is None:
            raise ArgumentError(message("indices", "batch", f"be one of epoch {epoch}", batch))
        return found

    def _tell(self) -> Tell:
        channel, rank = self._channel, self._rank
        if channel is None:
            return lambda values_of: values_of()[rank]
        return lambda values_of: deal_from_main(channel, values_of)


def _parts(
    sampling: Sampling, tell: Tell, world_size: int, epoch: int, first_batch: int
) -> Iterator[Batch]:
    """This rank's samples, batch by batch. Holds no more of the source than that."""
    batches = islice(sampling.batches(epoch), first_batch, None)
    place = (epoch, first_batch)

    def deal() -> list[tuple[tuple[int, int], list[Batch]]]:
        several = take_several(batches)
        return [
            (place, [_part(batch, rank, world_size) for batch in several])
            for rank in range(world_size)
        ]

    while True:
        theirs, parts = tell(deal)
        if theirs != place:
            raise ReplicaError(
                f"shard_loader: ranks must go through the same epochs together, got epoch {theirs[0]} "
                f"from batch {theirs[1]} on rank 0, and epoch {epoch} from batch {first_batch} here"
            )
        if not parts:
            return
        yield from parts


def _part(batch: Batch, rank: int, world_size: int) -> Batch:
    """A rank's consecutive part."""
    sizes = part_sizes(len(batch), world_size)
    start = sum(sizes[:rank])
    return batch[start : start + sizes[rank]]


def _numbers(batch: Batch) -> Tensor:
    try:
        return torch.tensor(batch, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        rule = "name samples by whole numbers"
        raise ArgumentError(message("indices", "sampler", rule, batch[0])) from error


def deal_from_main(channel: Channel, values_of: Callable[[], Sequence[Any]]) -> Any:
    """This rank's of the values that rank 0 computes, one a rank; where that fails, all ranks raise."""
    if not channel.state.is_main:
        kind, value = channel.deal(None)
        if kind == "refused":
            raise ArgumentError(value)
        if kind == "failed":
            raise ReplicaError(f"shard_loader: the sampler failed on rank 0: {value}")
        return pickle.loads(value)
    try:
        values = values_of()
        sent: list[tuple[str, Any]] = [("value", pickle.dumps(value)) for value in values]
    except Exception as error:
        ours = isinstance(error, ArgumentError)
        verdict = ("refused", str(error)) if ours else ("failed", repr(error))
        channel.deal([verdict] * channel.state.world_size)
        raise
    channel.deal(sent)
    return values[0]
