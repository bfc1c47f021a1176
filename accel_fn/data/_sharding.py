"""shard_loader: which of the ways to share out a loader is the one for it."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Literal, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from accel_fn._collectives import all_or_none
from accel_fn._comm import exchange
from accel_fn._errors import ArgumentError, ReplicaError, check_count, message
from accel_fn._state import DistState
from accel_fn.data._loader import ShardedLoader
from accel_fn.data._order import Order, check_sizes, mix
from accel_fn.data._ordered import OrderedSource
from accel_fn.data._streams import SPLITS, stream_source


def shard_loader(
    loader: DataLoader[Any],
    state: DistState,
    *,
    batch: Literal["global", "per_rank"] = "global",
    split: Literal["auto", "turns", "workers"] = "auto",
) -> ShardedLoader:
    """Share every batch of a `DataLoader` among the ranks, exactly.

    The loader's `batch_size` is the global batch: what one update sees. Each
    rank gets a consecutive part of it, at most one sample longer than any
    other's. Every sample comes once an epoch, and all ranks get the same
    number of batches: nothing is padded, and nothing dropped unless
    `drop_last` says so. A last batch of fewer samples than ranks joins the
    one before.

    Law: the parts of the ranks are the global batch, which is the same for every world size.

    Args:
        loader: over a map-style data set, in order or with `shuffle=True`. What
            else it was given (collate_fn, workers, pinning, ...) is kept.
        state: says which part; its `seed`, and the loader's generator's, say which order.
        batch: "global", or "per_rank" for torch's own meaning: `batch_size` is
            one rank's, and the global batch is world_size times that.
        split: how ranks share an `IterableDataset`. "turns": each reads the whole
            stream and keeps its parts. "workers": each reads what the data set
            gives to its workers, as it says by `get_worker_info`. "auto": each
            reads a shard where the data set has a method `shard(num_shards=, index=)`
            and shards for all, else they take turns.

    Returns:
        A loader: `len`, `iter` (epoch 0), `epochs(num_epochs, since=state)`.

    Raises:
        ValueError: on every rank alike: a global batch or a data set smaller
            than the world, a loader with a sampler of its own or of a stream,
            without a batch size, or sharded already.
        RuntimeError: ranks gave loaders of different length, batch size or seed.

    Cost: in a world of several, two small collectives, once. Per batch, this
    rank's samples alone are read.

    >>> import torch, accel_fn as af
    >>> data = torch.utils.data.TensorDataset(torch.arange(10))
    >>> loader = torch.utils.data.DataLoader(data, batch_size=4)
    >>> [batch[0].tolist() for batch in af.shard_loader(loader, af.DistState(rank=1, world_size=2))]
    [[2, 3], [6, 7], [9]]
    """
    if batch not in ("global", "per_rank"):
        raise ArgumentError(message("shard_loader", "batch", 'be "global" or "per_rank"', batch))
    if split not in SPLITS:
        rule = "be one of " + ", ".join(map(repr, SPLITS))
        raise ArgumentError(message("shard_loader", "split", rule, split))
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return ShardedLoader(stream_source(loader, state, batch=batch, split=split))
    if state.group is None:
        return ShardedLoader(OrderedSource(loader, _order(loader, state, batch), state.rank))
    order = all_or_none(lambda: _order(loader, state, batch), state, "shard_loader")
    for rank, other in enumerate(exchange(order, state, "shard_loader")):
        if other != order:
            raise ReplicaError(
                f"shard_loader: loader must be the same on every rank, got {other} on rank {rank} "
                f"and {order} on rank {state.rank}"
            )
    return ShardedLoader(OrderedSource(loader, order, state.rank))


def _order(loader: Any, state: DistState, batch: str) -> Order:
    """The order that a loader asks for, checked."""
    if not isinstance(loader, DataLoader):
        repair = "give it the loader that was sharded" if isinstance(loader, ShardedLoader) else ""
        raise ArgumentError(
            message(
                "shard_loader", "loader", "be a torch DataLoader", type(loader).__name__, repair
            )
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise ArgumentError(
            message(
                "shard_loader", "loader", "have a batch_size", f"batch_size={loader.batch_size}"
            )
        )
    sampler = loader.batch_sampler.sampler
    if type(sampler) not in (RandomSampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler)
        and (sampler.replacement or sampler._num_samples is not None)
    ):
        raise ArgumentError(
            message(
                "shard_loader",
                "loader",
                "go through its data in order or with shuffle=True",
                type(sampler).__name__,
                "the ranks are shared out here, so no DistributedSampler",
            )
        )
    drop_last = loader.batch_sampler.drop_last
    batch_size = check_count("shard_loader", "batch_size", loader.batch_sampler.batch_size)
    if batch == "per_rank":
        batch_size *= state.world_size
    seed = state.seed
    generator = loader.generator or getattr(sampler, "generator", None)
    if generator is not None:
        seed = mix(mix(seed) + generator.initial_seed())
    order = Order(
        num_samples=len(cast("Sized", loader.dataset)),
        batch_size=batch_size,
        world_size=state.world_size,
        shuffle=isinstance(sampler, RandomSampler),
        drop_last=drop_last,
        seed=seed,
    )
    check_sizes("shard_loader", order)
    return order
