"""Division of a stream over ranks, from the options of its loader: the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from accel_fn.base.state import DistState
from accel_fn.data.order import Cut, check_batch_size, per_rank_error
from accel_fn.data.same_loader import knows_ranks
from accel_fn.data.streams.split import Split, num_shards, shard_of
from accel_fn.errors import ArgumentError, StateError, check_count, message


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options that must be the same on all ranks; without a `split` they read round robin."""

    cut: Cut
    world_size: int
    split: Split | None
    num_items: int | None
    seed: int


def read_stream_options(
    loader: DataLoader[Any], state: DistState, *, batch: str, split: str
) -> StreamOptions:
    """Read and check the options."""
    cut = _cut(loader, state, batch)
    return StreamOptions(
        cut,
        state.world_size,
        _split(loader, state, split),
        _declared_length(loader.dataset),
        state.seed,
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
    check_batch_size("shard_loader", batch_size, state.world_size)
    return Cut(batch_size, state.world_size, loader.drop_last)


def _split(loader: DataLoader[Any], state: DistState, option: str) -> Split | None:
    data, readers = loader.dataset, max(1, loader.num_workers)
    if option == "auto":
        most = num_shards(data)
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


def _declared_length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # streams without a length raise one or the other
        return None
