"""Assigns each part of each tensor to a rank, by torch's planners, over our manifest.

The planners know whole and sharded tensors, give each rank a part of what all hold as replicas,
and read a checkpoint of one world into the shards of another. Their own storage
keeps its metadata as a pickle, which could run code. Importing them takes half a second, so
that happens in the functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel_fn.checkpoint.format.manifest import Chunk, Entry
from accel_fn.core.dtensor import is_sharded
from accel_fn.core.primitives import exchange
from accel_fn.core.state import DistState


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a tensor that this rank writes, and where in the whole it belongs."""

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor


def plan_parts(tensors: Mapping[str, Any], state: DistState) -> list[Part]:
    """Choose this rank's share of the tensors that all ranks hold, as shards or as replicas.

    Cost: two small collectives; none in a world of one, whose rank writes all.
    """
    if state.world_size == 1 and not any(map(is_sharded, tensors.values())):
        return [Part(name, (), tensor.detach()) for name, tensor in tensors.items()]
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), is_coordinator=state.is_main)
    plans = exchange(planner.create_local_plan(), state, "save")
    shared, _ = planner.create_global_plan(plans)
    found = []
    for item in planner.finish_plan(shared[state.rank]).items:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        found.append(Part(item.index.fqn, tuple(item.index.offset or ()), tensor.detach()))
    return found


def to_entries(tensors: Mapping[str, Any]) -> dict[str, Entry]:
    return {
        name: Entry(name_of_dtype(each.dtype), tuple(each.shape), ())
        for name, each in tensors.items()
    }


def name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Reading:
    """A part of a chunk, from `start` in it, that belongs into a part of a tensor of this rank."""

    chunk: Chunk
    dtype: torch.dtype
    start: tuple[int, ...]
    target: Tensor


def plan_readings(tensors: Mapping[str, Any], entries: Mapping[str, Entry]) -> Iterator[Reading]:
    """Find the chunks, or parts of them, that the tensors of this rank are made of."""
    whole = {name: each for name, each in tensors.items() if _is_one_chunk(each, entries[name])}
    for name, tensor in whole.items():
        (chunk,) = entries[name].chunks
        dtype = getattr(torch, entries[name].dtype)
        yield Reading(chunk, dtype, chunk.offsets, tensor.detach())
    if len(whole) < len(tensors):
        rest = {name: each for name, each in tensors.items() if name not in whole}
        yield from _planned_readings(rest, entries)


def _is_one_chunk(tensor: Any, entry: Entry) -> bool:
    """Does a chunk hold the whole tensor, as it stands on this rank?"""
    # Most tensors do, and torch's planners take longer for one than its reading.
    if is_sharded(tensor) or len(entry.chunks) != 1:
        return False
    return tuple(tensor.shape) == entry.shape == entry.chunks[0].sizes


def _planned_readings(
    tensors: Mapping[str, Any], entries: Mapping[str, Entry]
) -> Iterator[Reading]:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    planner = DefaultLoadPlanner(flatten_state_dict=False)
    metadata = Metadata({name: _metadata(entries[name]) for name in tensors})
    planner.set_up_planner(dict(tensors), metadata)
    chunks = {
        MetadataIndex(name, chunk.offsets): chunk
        for name in tensors
        for chunk in entries[name].chunks
    }
    for item in planner.finish_plan(planner.create_local_plan()).items:
        chunk = chunks[item.storage_index]
        dtype = getattr(torch, entries[item.storage_index.fqn].dtype)
        target = planner.resolve_tensor(item).detach()
        yield Reading(chunk, dtype, tuple(item.storage_offsets), target)


def _metadata(entry: Entry) -> Any:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    blocks = [
        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        for chunk in entry.chunks
    ]
    properties = TensorProperties(dtype=getattr(torch, entry.dtype))
    return TensorStorageMetadata(properties, torch.Size(entry.shape), blocks)
