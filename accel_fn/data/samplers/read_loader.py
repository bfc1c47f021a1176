"""The order of a DataLoader, from its options: sequential, shuffled, or a user's sampler."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from accel_fn.core.state import DistState
from accel_fn.data.loader import ShardedLoader
from accel_fn.data.order import (
    ItemOrder,
    Order,
    WholeOrder,
    check_sizes,
    knows_ranks,
    length_of,
    mix,
    per_rank_error,
)
from accel_fn.data.samplers.sampler_batches import SamplerBatches, nested_samplers
from accel_fn.data.set_epoch import may_sample, reached_from
from accel_fn.errors import ArgumentError, ArgumentTypeError, check_count, message


def read_order(
    loader: Any,
    state: DistState,
    *,
    batch: str,
    split: str,
    read_ahead: int | None,
    collates_whole: bool,
) -> Order | SamplerBatches:
    """Read the order of a loader and check it; `batch` is the meaning of its batch size.

    With `collates_whole`, every rank reads and collates the samples of all ranks.
    """
    if split != "auto":
        rule = "be left out for a data set that can be indexed"
        raise ArgumentError(message("shard_loader", "split", rule, split))
    order = _read_order(loader, state, batch)
    if collates_whole and isinstance(order, SamplerBatches):
        order = replace(order, collates_whole=True)
    elif collates_whole and not isinstance(order, ItemOrder):
        order = WholeOrder(**asdict(order))
    if isinstance(order, SamplerBatches) and order.is_own:
        return replace(order, at_once=1 + _num_beyond(loader, read_ahead))
    refuse_read_ahead(read_ahead)
    return order


def refuse_read_ahead(read_ahead: int | None) -> None:
    """Refuse the option for a loader whose order no loop can change."""
    if read_ahead is not None:
        rule = "be left out for a loader without a sampler of your own"
        raise ArgumentError(message("shard_loader", "read_ahead", rule, read_ahead))


def _num_beyond(loader: DataLoader[Any], read_ahead: int | None) -> int:
    """Return how many batches to read ahead beyond those that workers need."""
    least = loader.num_workers * (loader.prefetch_factor or 0)
    if read_ahead is None:
        return 0
    if check_count("shard_loader", "read_ahead", read_ahead, minimum=0) < least:
        rule = f"be >= {least}, as the workers read ahead"
        repair = "use fewer workers or a smaller prefetch_factor"
        raise ArgumentError(message("shard_loader", "read_ahead", rule, read_ahead, repair))
    return read_ahead - least


def _read_order(loader: Any, state: DistState, batch: str) -> Order | SamplerBatches:
    _check(loader)
    batch_sampler, seed = _outermost(loader), _seed(loader, state)
    is_ready = loader.batch_sampler is None
    if batch == "per_rank" and is_ready:
        raise per_rank_error("batch_size=None", "a data set or a sampler")
    if is_ready and _goes_through(batch_sampler, loader.dataset):
        shuffle, size = _is_of(batch_sampler, RandomSampler), len(loader.dataset)
        order = ItemOrder(1, 1, drop_last=False, num_samples=size, shuffle=shuffle, seed=seed)
        check_sizes("shard_loader", order, size)
        return order
    if not _is_of(batch_sampler, BatchSampler):
        if batch == "per_rank":
            raise per_rank_error(type(batch_sampler).__name__, "a batch_sampler")
        length = length_of(batch_sampler)
        return SamplerBatches(batch_sampler, seed, length=length, gives_keys=is_ready)
    sampler, drop_last = batch_sampler.sampler, batch_sampler.drop_last
    batch_size = check_count("shard_loader", "batch_size", batch_sampler.batch_size)
    batch_size *= state.world_size if batch == "per_rank" else 1
    plain = _goes_through(sampler, loader.dataset)
    num_samples = length_of(loader.dataset if plain else sampler)
    cut = None
    if num_samples is not None:
        cut = Order(
            num_samples=num_samples,
            batch_size=batch_size,
            world_size=state.world_size,
            shuffle=_is_of(sampler, RandomSampler),
            drop_last=drop_last,
            seed=seed,
        )
        check_sizes("shard_loader", cut, num_samples, "data set" if plain else "sampler")
    if plain and cut is not None:
        return cut
    batches = BatchSampler(sampler, batch_size, drop_last)
    return SamplerBatches(batches, seed, cut)


def _check(loader: Any) -> None:
    """Refuse other types than DataLoader, and loaders that are unordered, unsized or sharded already."""
    if not isinstance(loader, DataLoader):
        repair = "give it the loader that was sharded" if isinstance(loader, ShardedLoader) else ""
        name = type(loader).__name__
        raise ArgumentError(
            message("shard_loader", "loader", "be a torch DataLoader", name, repair)
        )
    for sampler in [*nested_samplers(_outermost(loader)), *_held(_outermost(loader))]:
        if isinstance(sampler, DistributedSampler) or knows_ranks(sampler):
            rule, name = "not be sharded over ranks already", type(sampler).__name__
            repair = "leave that sampler out, and use shuffle=True if it shuffles"
            raise ArgumentError(message("shard_loader", "loader", rule, name, repair))
    if loader.num_workers and not getattr(loader, "in_order", True):
        rule = "keep batches in order, by which a run knows its position"
        raise ArgumentError(message("shard_loader", "loader", rule, "in_order=False"))
    if length_of(loader.dataset) is None and _is_of(loader.sampler, SequentialSampler):
        rule, name = "have a length, or a sampler", type(loader.dataset).__name__
        raise ArgumentTypeError(message("shard_loader", "data set", rule, name))


def _outermost(loader: DataLoader[Any]) -> Any:
    """Return the sampler that gives batches; without a batch_sampler it gives keys of ready ones."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _held(sampler: Any) -> list[Sampler[Any]]:
    """Collect the samplers that a sampler holds, under any name and at any depth."""
    return [each for each in reached_from(sampler, may_sample) if isinstance(each, Sampler)]


def _is_of(sampler: Any, kind: type) -> bool:
    """Is the class exactly torch's, or the one that torchdata's StatefulDataLoader replaces it by?"""
    return type(sampler) is kind or (
        _is_torchdatas(sampler) and type(sampler).__name__ == kind.__name__
    )


def _is_torchdatas(sampler: Any) -> bool:
    return type(sampler).__module__.startswith("torchdata.")


def _goes_through(sampler: Any, dataset: Any) -> bool:
    """Does the sampler give every sample of the data set once, in order or shuffled?

    Ranks then compute the order, and no rank runs the sampler.
    """
    if not (_is_of(sampler, SequentialSampler) or _is_of(sampler, RandomSampler)):
        return False
    again = getattr(sampler, "replacement", False) or getattr(sampler, "_num_samples", None)
    return not again and length_of(sampler.data_source) == length_of(dataset)


def _seed(loader: DataLoader[Any], state: DistState) -> int:
    """Return the state's seed, mixed with that of a generator that the user gave."""
    # torchdata's samplers make a generator of their own, with another seed in each process.
    samplers = [each for each in nested_samplers(_outermost(loader)) if not _is_torchdatas(each)]
    for generator in (loader.generator, *(getattr(each, "generator", None) for each in samplers)):
        if isinstance(generator, torch.Generator):
            return mix(mix(state.seed) + generator.initial_seed())
    return state.seed
