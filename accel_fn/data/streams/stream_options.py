"""Division of a stream over ranks, from the options of its loader: the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accel_fn.core.state import DistState
from accel_fn.data.order import Cut, knows_ranks, length_of, per_rank_error
from accel_fn.errors import ArgumentError, ArgumentTypeError, StateError, check_count, message


@dataclass(frozen=True, slots=True)
class Split:
    """The division into shards: worker w of rank r is reader r * readers_per_rank + w."""

    kind: str  # "shard": by the data set's method; "workers": it splits itself by `get_worker_info`
    world_size: int
    readers_per_rank: int

    @property
    def num_readers(self) -> int:
        return self.world_size * self.readers_per_rank


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options that must be the same on all ranks; without a `split` they read round robin."""

    cut: Cut
    world_size: int
    split: Split | None
    num_items: int | None
    seed: int
    collates_whole: bool
    """Does every rank collate the items of all ranks? The cut is then that of one rank."""


def read_stream_options(
    loader: DataLoader[Any], state: DistState, *, batch: str, split: str, collates_whole: bool
) -> StreamOptions:
    """Read and check the options."""
    cut = _cut(loader, state, batch)
    if collates_whole:
        if split == "workers":
            rule = 'be "round_robin" beside collate="global", for which every rank reads all items'
            raise ArgumentError(message("shard_loader", "split", rule, split))
        cut, split = replace(cut, world_size=1), "round_robin"
    return StreamOptions(
        cut,
        state.world_size,
        _split(loader, state, split),
        length_of(loader.dataset),
        state.seed,
        collates_whole,
    )


def _cut(loader: DataLoader[Any], state: DistState, batch: str) -> Cut:
    if loader.num_workers and not getattr(loader, "in_order", True):
        rule = "be True over a stream, whose batches ranks could not match otherwise"
        raise ArgumentError(message("shard_loader", "in_order", rule, False))
    by_node = getattr(loader.dataset, "_distributed", None) is not None
    if by_node or knows_ranks(loader.dataset):
        rule, name = "be over a whole data set, not one rank's part", type(loader.dataset).__name__
        repair = "leave out split_dataset_by_node, or its rank: shard_loader splits it over ranks"
        raise ArgumentError(message("shard_loader", "loader", rule, name, repair))
    if loader.batch_size is None:
        if batch == "per_rank":
            raise per_rank_error("batch_size=None", "a data set")
        return Cut(1, 1, drop_last=False)  # every rank reads each item, which is a global batch
    batch_size = check_count("shard_loader", "batch_size", loader.batch_size)
    if batch == "per_rank":
        batch_size *= state.world_size
    return Cut(batch_size, state.world_size, loader.drop_last)


def _split(loader: DataLoader[Any], state: DistState, option: str) -> Split | None:
    data, readers = loader.dataset, max(1, loader.num_workers)
    if option == "auto":
        most = _num_shards(data)
        if most is not None:
            readers = min(readers, most // state.world_size)
    if loader.batch_size is None:
        if option == "workers":
            rule = 'be "round_robin" for a stream of ready batches, which every rank reads'
            raise ArgumentError(message("shard_loader", "split", rule, option))
        return None
    can_be_split = option == "workers" or (option == "auto" and hasattr(data, "shard"))
    if not can_be_split or state.world_size * readers <= 1:
        return None
    if state.group is None and state.world_size > 1:
        raise StateError(
            f"shard_loader: state must carry a process group to split a stream over {state.world_size} "
            'ranks, got one built by hand; take it from af.init(), or use split="round_robin"'
        )
    split = Split("shard" if option == "auto" else "workers", state.world_size, readers)
    if split.kind == "shard":
        shard_of(data, split.num_readers, state.rank * readers)
    return split


def _num_shards(data: Any) -> int | None:
    """Return the largest number of shards of a data set; None without such an attribute."""
    count = getattr(data, "num_shards", getattr(data, "n_shards", None))
    return count if isinstance(count, int) else None


def shard_of(data: Any, num_shards: int, index: int) -> IterableDataset[Any]:
    """Return one shard of a data set that can be split."""
    shard = data.shard(num_shards=num_shards, index=index)
    if not isinstance(shard, IterableDataset):
        rule, got = "return an IterableDataset", type(shard).__name__
        repair = 'or use split="round_robin"'
        raise ArgumentTypeError(message("shard_loader", "shard()", rule, got, repair))
    return shard
