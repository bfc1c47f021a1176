"""Batches of a user's own sampler: rank 0 runs it and sends every rank its part of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accel_fn.core.mesh_axes import ranks_along
from accel_fn.core.split_batch import part_bounds
from accel_fn.core.state import DistState, mesh_of
from accel_fn.data.empty_part import EmptyPart
from accel_fn.data.indexed.load_batches import BatchReader
from accel_fn.data.loader import Numbered
from accel_fn.data.order import no_numbers
from accel_fn.data.sampled_batches import SampledBatches, SampledParts
from accel_fn.data.samplers.sampler_batches import Batch, SamplerBatches
from accel_fn.data.set_epoch import LoopEpochs, may_sample
from accel_fn.errors import ArgumentError, ArgumentTypeError, check_equal, message
from accel_fn.parallel.messages import Channel

_MOST_NOTED = 1000


class SamplerSource:
    """A `Source`: this rank's part of every batch of a sampler that rank 0 runs.

    Without a channel every rank runs it, under the same random numbers.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sampling: SamplerBatches,
        state: DistState,
        channel: Channel | None,
    ) -> None:
        is_whole = sampling.collates_whole
        self._reader = BatchReader(loader, state.rank, state.world_size, collates_whole=is_whole)
        self._sampling = sampling
        self._rank = state.rank
        self._world_size = state.world_size
        self._channel = channel
        self._num_ahead = loader.num_workers * (loader.prefetch_factor or 0)
        self._sizes: dict[tuple[int, int], int] = {}
        """Samples of batches that were taken from the sampler and are not given yet."""
        self._loop_epochs = LoopEpochs(sampling.batch_sampler, may_sample)
        self.facts = sampling.facts

    def num_batches(self) -> int:
        """Return the batches of an epoch, if the sampler has a length."""
        num_batches = self._sampling.num_batches()
        if num_batches is None:
            name = type(self._sampling.batch_sampler).__name__
            repair = "iterate without it, or give the sampler a __len__"
            rule = "have a length"
            raise ArgumentTypeError(message("len", "the loader's sampler", rule, name, repair))
        return num_batches

    def batches(
        self, epoch: int | None, first_batch: int, *, by_loop: bool = False
    ) -> Iterator[Any]:
        """Yield an epoch's parts from `first_batch` on. All ranks iterate together."""
        keeps = by_loop and self._loop_epochs.are_set()

        def load(parts: Iterator[Any], **settings: Any) -> Iterator[Any]:
            noted = self._noted(parts, epoch or 0, first_batch)
            return self._reader.batches(noted, by_loop=by_loop, **settings)

        return self._read(load, epoch, first_batch, keeps=keeps)

    def numbered(self, epoch: int | None, first_batch: int) -> Iterator[Numbered[Any]]:
        return self._read(self._reader.numbered, epoch, first_batch)

    def _read(
        self,
        load: Callable[..., Iterator[Any]],
        epoch: int | None,
        first_batch: int,
        *,
        keeps: bool = False,
    ) -> Iterator[Any]:
        channel = None if self._channel is None else self._channel.another()
        parts = self._parts(channel, epoch or 0, first_batch, keeps=keeps)
        seed = self._sampling.seed
        sampled = SampledParts(parts, self._num_ahead, None if channel is None else channel.fail)
        found = load(sampled, epoch=epoch, first_batch=first_batch, seed=seed)
        return SampledBatches(found, sampled)

    def num_samples(self, epoch: int, batch: int) -> int | None:
        """Return the samples of a batch that `batches` is giving, if it has noted them."""
        return self._sizes.pop((epoch, batch), None)

    def position(self, step: int, window: int = 1) -> tuple[int, int]:
        """Compute the position if the sampler has a length, else run it, which all ranks must do."""
        if self._sampling.cut is not None or self._channel is None:
            return self._sampling.position(step, window)
        place: tuple[int, int] = self._channel.another().via_main(
            None, lambda ranks: [self._sampling.position(step, window)] * len(ranks)
        )
        return place

    def indices(self, epoch: int, batch: int) -> Tensor:
        part = _part(self._batch(epoch, batch), self._rank, self._world_size)
        return _numbers([] if isinstance(part, EmptyPart) else part)

    def global_indices(self, epoch: int, batch: int) -> Tensor:
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

    def _noted(self, parts: Iterator[Any], epoch: int, first_batch: int) -> Iterator[Any]:
        """Yield parts, and note how many samples they have."""
        for batch, part in enumerate(parts, first_batch):
            # Nobody asks for all of them.
            if isinstance(part, list) and len(self._sizes) < _MOST_NOTED:
                own = part
                if self._sampling.collates_whole:
                    own = _part(part, self._rank, self._world_size)
                self._sizes[epoch, batch] = 0 if isinstance(own, EmptyPart) else len(own)
            yield part

    def _parts(
        self, channel: Channel | None, epoch: int, first_batch: int, *, keeps: bool
    ) -> Iterator[Batch]:
        """Yield this rank's samples, batch by batch."""
        batches = islice(self._sampling.batches(epoch, keeps=keeps), first_batch, None)
        is_whole = self._sampling.collates_whole
        if channel is None:
            if is_whole:
                return batches
            return (_part(batch, self._rank, self._world_size) for batch in batches)
        take = partial(self._sampling.take, batches)
        return _received(take, channel, (epoch, first_batch), is_whole=is_whole)


def _received(
    take: Callable[[], list[Batch]],
    channel: Channel,
    start: tuple[int, int],
    *,
    is_whole: bool,
) -> Iterator[Batch]:
    """Yield this rank's parts as rank 0 sends them, or whole batches; only rank 0 takes batches."""
    # Ranks along `dp` share a batch; those along other axes take the same part of it.
    shape = mesh_of(channel.state)
    along = [ranks_along(shape, "dp", rank) for rank in range(channel.state.world_size)]
    places = [(ranks.index(rank), len(ranks)) for rank, ranks in enumerate(along)]
    if is_whole:
        places = [(0, 1)] * len(places)

    def parts_of_ranks(starts: list[tuple[int, int]]) -> list[list[Batch]]:
        check_equal(
            [f"epoch {epoch} from batch {batch}" for epoch, batch in starts],
            "shard_loader: ranks must go through the same epochs together",
        )
        several = take()
        return [[_part(batch, *place) for batch in several] for place in places]

    while parts := channel.via_main(start, parts_of_ranks):
        yield from parts


def _part(batch: Batch, rank: int, world_size: int) -> Batch:
    """Return a rank's samples; the key of a ready batch goes to every rank, which cuts what it reads."""
    if not isinstance(batch, list):
        return batch
    start, stop = part_bounds(len(batch), world_size, rank)
    return batch[start:stop] or EmptyPart(batch[:1])


def _numbers(batch: Batch) -> Tensor:
    if not isinstance(batch, list):
        raise no_numbers()
    try:
        return torch.tensor(batch, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        rule = "name samples by whole numbers"
        raise ArgumentError(message("indices", "sampler", rule, batch[0])) from error
