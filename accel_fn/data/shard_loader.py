"""shard_loader: split a loader over ranks, by the source of batches that fits it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset

from accel_fn.core.state import DistState, check_state, over
from accel_fn.data.collate import stacks_plainly
from accel_fn.data.compare_loaders import same_on_all_ranks
from accel_fn.data.drawn_order import DrawnSource
from accel_fn.data.indexed import (
    IndexedSource,
    SamplerSource,
    read_order,
    refuse_order,
    refuse_read_ahead,
)
from accel_fn.data.loader import DrawnPass, Position, ShardedLoader
from accel_fn.data.order import Cut, Order
from accel_fn.data.streams import StreamSource, read_stream_options
from accel_fn.errors import ArgumentError, message
from accel_fn.parallel.messages import open_channel

_SPLITS = ("auto", "round_robin", "workers")
_COLLATES = ("rank", "global")
_ORDERS = ("seed", "torch", "distributed")


def shard_loader(
    loader: DataLoader[Any],
    state: DistState,
    *,
    batch: Literal["global", "per_rank"] = "global",
    split: Literal["auto", "round_robin", "workers"] = "auto",
    collate: Literal["rank", "global"] = "rank",
    order: Literal["seed", "torch", "distributed"] = "seed",
    read_ahead: int | None = None,
) -> ShardedLoader:
    """Split every batch of a `DataLoader` over the ranks, exactly.

    The loader's `batch_size` is the size of the global batch, which one update uses. Each rank gets
    a consecutive part of it, at most one sample longer than another rank's. Every sample is used
    once per epoch, and all ranks get the same number of batches: nothing is padded, and nothing is
    dropped without `drop_last`. If a batch has fewer samples than there are ranks, the last ranks
    get an empty part: a batch of one sample, cut to no rows, so that `for x, y in loader` unpacks.
    The part is None if rows cannot be cut, such as the tokens of all samples in one row.

    Law: the parts of the ranks are the global batch. The batches, and their number, are the same
    for every world size. If a stream is split, every item is used once per epoch.
    Tests: `tests/laws/law08_sharding.py`, `tests/laws/law08_streams.py`.

    Args:
        loader: a loader over any data set; its collate_fn, workers, pinning and so on are kept.
            Rank 0 runs your own sampler or batch sampler, with its own random numbers, and sends
            every rank its part: all ranks iterate such a loader together. With `batch_size=None`,
            each item is a global batch, cut as by `shard_batch`, and each list of indices from a
            sampler is cut before its rows are read.
        state: this rank's state. Its `seed` and the seed of the loader's generator determine the
            order. On a mesh, the ranks along `dp` share each batch, and ranks along other axes get
            the same part.
        batch: "global", or "per_rank" for torch's own meaning: `batch_size` is
            one rank's, and the global batch is world_size times that.
        split: how ranks share an `IterableDataset`. "round_robin": each rank reads the whole stream
            and keeps its part of every batch. "workers": the data set splits itself by
            `get_worker_info`, over the workers of all ranks. "auto": each rank reads a shard if the
            data set has a method `shard(num_shards=, index=)` and a shard for each rank, else round
            robin. A rank whose shards have ended gets empty parts until all ranks' shards have
            ended. So the batches depend on the number of ranks and workers, and the loader has no
            `len`.
        collate: "rank": collate_fn is called with the samples of a rank's part. "global": every
            rank reads and collates the whole batch, then keeps its rows. Use it for a collate_fn
            that computes over all samples: a denominator, mixed images. It must return as many rows
            in each tensor and, if it draws random numbers, the same numbers on every rank. Nothing
            changes with torch's own collate_fn, which stacks samples.
        order: the order of each pass with `shuffle=True`. "seed": a permutation that depends only
            on the seed and the number of the pass. "torch": the order of the `DataLoader` itself,
            and of accelerate. Rank 0 draws as torch does, from the generator of the loader or the
            global one, when the loop begins a pass. So the order of the second pass also depends on
            what the loop has drawn from the global generator on rank 0. "distributed": the order of
            `DistributedSampler(data)` with `set_epoch` at each pass.
        read_ahead: how many batches a sampler or batch sampler of your own may be read ahead of the loop,
            which may change it, such as its sampling weights. Default: as few as torch's loader
            does, 0 without workers, else num_workers * prefetch_factor. A larger number saves messages.

    Returns:
        A loader: `len`, `iter` (the next pass), `epoch`, `epochs(num_epochs, since=state)`. Torch's
        `DataLoader[T]` names the type of a sample; annotate the type of a batch: `loader:
        af.ShardedLoader[Batch] = ...`.

    Raises:
        ValueError: on every rank: the loader has no batch, is sharded already, or
            gives batches out of order.
        RuntimeError: the loaders of the ranks differ in length, batch size or seed; with
            `order="torch"`, in a pass: ranks are in different passes.

    Warns:
        UserWarning: on the main rank: the global batch or the data set is smaller than the world, so
            some ranks idle; in a pass, the first 16 items of a stream that all ranks read differ between
            them.

    Cost: in a world of several, four small collectives, once. Per batch, a rank reads only its own
    samples, in one read if the data set is of tensors or arrays. With your own sampler, two or
    three messages per rank and batch, or per `read_ahead + 1` batches. With a torch sampler that is
    neither in order nor shuffled, two or three messages per some thousand samples. With
    `order="torch"`, two messages per rank and pass, and, as with "distributed", 8 bytes of host
    memory for each sample of the data set. Round robin reads all items of a stream on every rank,
    with two small messages per rank and batch, and hashes the first 16 of a pass. If a stream is
    split, a rank reads its own shards, with two small messages per rank and batch. With
    `collate="global"`, every rank reads and collates for all ranks, and holds the whole batch as
    long as its rows.

    >>> import torch, accel_fn as af
    >>> data = torch.utils.data.TensorDataset(torch.arange(10))
    >>> loader = torch.utils.data.DataLoader(data, batch_size=4)
    >>> [batch[0].tolist() for batch in af.shard_loader(loader, af.DistState(rank=1, world_size=2))]
    [[2, 3], [6, 7], [9]]
    """
    check_state("shard_loader", state)
    if batch not in ("global", "per_rank"):
        raise ArgumentError(message("shard_loader", "batch", 'be "global" or "per_rank"', batch))
    if split not in _SPLITS:
        rule = "be one of " + ", ".join(map(repr, _SPLITS))
        raise ArgumentError(message("shard_loader", "split", rule, split))
    if collate not in _COLLATES:
        raise ArgumentError(message("shard_loader", "collate", 'be "rank" or "global"', collate))
    if order not in _ORDERS:
        rule = "be one of " + ", ".join(map(repr, _ORDERS))
        raise ArgumentError(message("shard_loader", "order", rule, order))
    options: dict[str, Any] = {"batch": batch, "split": split}
    # torch's default collate_fn makes the same row of a sample, whichever other samples are in the
    # batch. So each rank can collate its own samples.
    is_plain = isinstance(loader, DataLoader) and stacks_plainly(loader.collate_fn)
    options["collates_whole"] = collate == "global" and not is_plain
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        refuse_read_ahead(read_ahead)
        refuse_order(order)
        return ShardedLoader(_stream_source(loader, state, options), loader)
    options |= {"read_ahead": read_ahead, "order": order}
    position = Position()
    source = _indexed_source(loader, state, options, position.drawn)
    return ShardedLoader(source, loader, position)


def _stream_source(
    loader: DataLoader[Any], state: DistState, given: dict[str, Any]
) -> StreamSource:
    read = partial(read_stream_options, loader, over(state), **given)
    options = same_on_all_ranks(read, loader, state)
    cut = options.cut
    if options.collates_whole and loader.batch_size is not None:
        cut = replace(cut, world_size=options.world_size)
    _warn_of_idle_ranks(state, cut, options.num_items)
    state = over(state)
    is_alone = options.split is None and (state.world_size == 1 or state.group is None)
    return StreamSource(loader, options, state.rank, None if is_alone else open_channel(state))


def _indexed_source(
    loader: DataLoader[Any], state: DistState, given: dict[str, Any], drawn: DrawnPass
) -> IndexedSource | SamplerSource:
    data = over(state)
    read = partial(read_order, loader, data, **given)
    order = same_on_all_ranks(read, loader, state)
    cut = order if isinstance(order, Order) else order.cut
    if cut is not None:
        _warn_of_idle_ranks(state, cut, cut.num_samples)
    if isinstance(order, Order) and order.order == "torch":
        is_sent = order.shuffle and state.world_size > 1
        return DrawnSource(loader, order, state, open_channel(state) if is_sent else None, drawn)
    if isinstance(order, Order):
        return IndexedSource(loader, order, data.rank, data.world_size)
    channel = None if state.group is None else open_channel(state)
    return SamplerSource(loader, order, data, channel)


def _warn_of_idle_ranks(state: DistState, cut: Cut, num_samples: int | None) -> None:
    """Warn if some ranks have no sample in any batch."""
    size = cut.batch_size if num_samples is None else min(cut.batch_size, num_samples)
    if 0 < size < cut.world_size and state.is_main:
        what = f"batch_size={size}" if size == cut.batch_size else f"a data set of {size} samples"
        warnings.warn(
            f"shard_loader: {what} leaves {cut.world_size - size} of {cut.world_size} ranks without samples: "
            "they idle in every step; use larger batches or fewer ranks",
            stacklevel=4,
        )
