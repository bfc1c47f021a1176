"""shard_loader: which of the ways to share out a loader is the one for it."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset

from accel_fn.base.state import DistState
from accel_fn.comm.channel import Channel, open_channel
from accel_fn.comm.collectives import all_or_none
from accel_fn.data.indexed.indexed_source import OrderedSource
from accel_fn.data.loader import ShardedLoader
from accel_fn.data.order import Order
from accel_fn.data.same_loader import check_same
from accel_fn.data.samplers.read_loader import describe, read_order
from accel_fn.data.samplers.sampler_batches import Sampling
from accel_fn.data.samplers.sampler_source import DealtSource
from accel_fn.data.streams.stream_sources import SPLITS, stream_source
from accel_fn.errors import ArgumentError, message


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
        loader: over any data set; what it was given (collate_fn, workers, pinning, ...)
            is kept. A sampler or batch sampler of your own is run on rank 0, under random
            numbers of its own, and every rank is dealt its part: all ranks go through
            such a loader together.
        state: says which part; its `seed`, and the loader's generator's, say which order.
        batch: "global", or "per_rank" for torch's own meaning: `batch_size` is
            one rank's, and the global batch is world_size times that.
        split: how ranks share an `IterableDataset`. "turns": each reads the whole
            stream and keeps its parts. "workers": each reads what the data set
            gives to its workers, as it says by `get_worker_info`. "auto": each
            reads a shard where the data set has a method `shard(num_shards=, index=)`
            and shards for all, else they take turns. Where shards are uneven, what the
            longer ones still hold is shared out; which items make a batch then
            depends on the world.

    Returns:
        A loader: `len`, `iter` (epoch 0), `epochs(num_epochs, since=state)`. Torch's `DataLoader[T]`
        names the type of a sample; annotate that of a batch: `loader: af.ShardedLoader[Batch] = ...`.

    Raises:
        ValueError: on every rank alike: a global batch or a data set smaller
            than the world, a loader without batches, or sharded already, or
            that gives them out of order.
        RuntimeError: ranks gave loaders of different length, batch size or seed.

    Cost: in a world of several, four small collectives, once. Per batch, this
    rank's samples alone are read, in one read where the data set is of tensors or
    arrays. With a sampler of your own, three messages a rank per some thousand samples.
    Of a stream, turns read all items on every rank, and two small messages a rank say whether
    there is a batch; of one that is split, a rank reads its own, and says every few batches how
    much it holds.

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
    asked, channel = _agreed(loader, state, batch, split)
    if isinstance(asked, Order):
        return ShardedLoader(OrderedSource(loader, asked, state.rank))
    return ShardedLoader(DealtSource(loader, asked, state, channel))


def _agreed(
    loader: Any, state: DistState, batch: str, split: str
) -> tuple[Order | Sampling, Channel | None]:
    """What the loader asks for, the same on every rank; where that is a sampler, a line to deal through."""
    read = partial(_read, loader, state, batch, split)
    if state.group is None:
        return read(), None
    asked = all_or_none(read, state, "shard_loader")
    mine = asked if isinstance(asked, Order) else describe(loader, asked)
    check_same(mine, loader.dataset, state)
    return asked, None if isinstance(asked, Order) else open_channel(state)


def _read(loader: Any, state: DistState, batch: str, split: str) -> Order | Sampling:
    """What the loader asks for, checked; of what can be indexed nothing is split."""
    if split != "auto":
        rule = "be left out for a data set that can be indexed"
        raise ArgumentError(message("shard_loader", "split", rule, split))
    return read_order(loader, state, batch)
