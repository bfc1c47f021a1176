"""Write and read the tensors of a checkpoint; each rank handles its part of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_fn.checkpoint.files import (
    FileMark,
    check_file,
    memory_of,
    opened,
    read_into,
    uncounted,
    write_file,
)
from accel_fn.checkpoint.manifest import Chunk, Entry, Manifest
from accel_fn.checkpoint.names import file_of
from accel_fn.core.dtensor import is_sharded
from accel_fn.core.primitives import exchange
from accel_fn.core.state import DistState
from accel_fn.errors import CheckpointError

PAGEABLE = ("cpu", "mps")
"""Devices from which a copy to pinned memory is no faster. From other devices, such a copy is
asynchronous."""
_BLOCK_BYTES = 2**28
_ALIGNMENT = 64
"""In bytes, as torch aligns tensors: a copy is faster if both places have the same alignment."""
_AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a tensor that this rank writes, and its place in the whole tensor."""

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
    """A part of a chunk, from `start` in the chunk, and the part of a tensor that it fills."""

    chunk: Chunk
    dtype: torch.dtype
    start: tuple[int, ...]
    target: Tensor


def plan_readings(tensors: Mapping[str, Any], entries: Mapping[str, Entry]) -> Iterator[Reading]:
    """Yield the reads that fill this rank's tensors, each of a chunk or of a part of one."""
    whole = {name: each for name, each in tensors.items() if _is_one_chunk(each, entries[name])}
    for name, tensor in whole.items():
        (chunk,) = entries[name].chunks
        dtype = getattr(torch, entries[name].dtype)
        yield Reading(chunk, dtype, chunk.offsets, tensor.detach())
    if len(whole) < len(tensors):
        rest = {name: each for name, each in tensors.items() if name not in whole}
        yield from _planned_readings(rest, entries)


def _is_one_chunk(tensor: Any, entry: Entry) -> bool:
    """Return whether the tensor is not sharded, and a single chunk holds all of it."""
    # Most tensors are of this kind, and torch's planners would take longer than the read.
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


Buffers = dict[tuple[str, tuple[int, ...]], Tensor]
"""Host memory for the parts that this rank writes, reused from save to save."""


def new_buffers(parts: Sequence[Part], *, pinned: bool) -> Buffers:
    """Allocate a host buffer for each part, many in one block of memory.

    Single buffers would waste memory: torch rounds each pinned allocation up to a power of two.
    """
    found: Buffers = {}
    for group in blocks_of(parts):
        sizes = [-(-part.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for part in group]
        block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        for part, own in zip(group, torch.split(block, sizes), strict=True):
            tensor = part.tensor
            values = own[: tensor.nbytes].view(tensor.dtype)
            found[part.name, part.offsets] = values.view(tensor.shape)
    return found


def blocks_of(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Group neighbouring parts up to the size of a block."""
    group, size = list[Part](), 0
    for part in parts:
        if group and size + part.tensor.nbytes > _BLOCK_BYTES:
            yield group
            group, size = [], 0
        group.append(part)
        size += part.tensor.nbytes
    if group:
        yield group


def copied_to_host(parts: Sequence[Part]) -> Iterator[tuple[Part, Tensor]]:
    """Copy tensors to the host, and wait for an accelerator once for each block."""
    for group in blocks_of(parts):
        moved = [part for part in group if part.tensor.device.type not in PAGEABLE]
        buffers = new_buffers(moved, pinned=True)
        for part in moved:
            buffers[part.name, part.offsets].copy_(part.tensor, non_blocking=True)
        for device in {part.tensor.device for part in moved}:
            torch.accelerator.synchronize(device)
        for part in group:
            yield part, buffers.get((part.name, part.offsets), part.tensor).cpu()


@dataclass(frozen=True, slots=True)
class Written:
    """The files that a rank has written: chunks by tensor name, and marks by file name."""

    chunks: Mapping[str, tuple[Chunk, ...]]
    files: Mapping[str, FileMark]


@dataclass(frozen=True, slots=True)
class Share:
    """The data that one rank writes into a checkpoint."""

    rank: int
    files: Mapping[str, bytes]
    parts: Sequence[Part]

    def num_bytes(self) -> int:
        return sum(map(len, self.files.values())) + sum(part.tensor.nbytes for part in self.parts)

    def write(self, folder: Path, count: Callable[[int], object] = uncounted) -> Written:
        file = file_of("tensors", self.rank, "bin")
        chunks: dict[str, tuple[Chunk, ...]] = {}
        try:
            marks = {
                name: write_file(folder / name, [data], count) for name, data in self.files.items()
            }
            if self.parts:
                marks[file] = write_file(folder / file, self._tensor_bytes(file, chunks), count)
        except OSError as error:
            raise write_error(folder, error) from error
        return Written(chunks, marks)

    def _tensor_bytes(
        self, file: str, chunks: dict[str, tuple[Chunk, ...]]
    ) -> Iterator[memoryview]:
        """Yield the bytes of tensors; record in `chunks` where each tensor lies in the file.

        Zeros before a tensor make it start at a multiple of `_ALIGNMENT`.
        """
        start = 0
        for part, tensor in copied_to_host(self.parts):
            gap = -start % _ALIGNMENT
            if gap:
                yield memoryview(bytes(gap))
            start += gap
            view = memory_of(tensor.resolve_conj().resolve_neg().contiguous())
            shape = tuple(tensor.shape)
            offsets = part.offsets or (0,) * len(shape)
            chunk = Chunk(offsets, shape, file, start, len(view))
            chunks[part.name] = (*chunks.get(part.name, ()), chunk)
            start += len(view)
            yield view


def write_error(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"save: folder must be one that can be written to, got {str(folder.parent)!r} "
        f"({error.strerror or error}); checkpoints that were there are as they were"
    )


def check_sizes(checkpoint: Path, manifest: Manifest) -> None:
    for name, mark in manifest.files.items():
        with opened(checkpoint / name) as file:
            size = os.fstat(file).st_size
        if size != mark.size:
            raise CheckpointError(
                f"load: {checkpoint / name} is damaged: it must have {mark.size} bytes, got {size}"
            )


def check_files(
    path: Path,
    manifest: Manifest,
    names: Iterable[str],
    count: Callable[[int], object] = uncounted,
) -> None:
    with _pool() as pool:
        for name in names:
            check_file(path / name, manifest.files[name], pool, count)


def read_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    entries: Mapping[str, Entry],
    count: Callable[[int], object],
) -> None:
    readings = list(plan_readings(tensors, entries))
    with ExitStack() as stack, _pool() as pool:
        names = {each.chunk.file for each in readings}
        files = {name: stack.enter_context(opened(path / name)) for name in names}
        # A task does several readings, since starting a task costs more than reading a small
        # tensor.
        some = [readings[at : at + _AT_A_TIME] for at in range(0, len(readings), _AT_A_TIME)]
        for num_bytes in pool.map(
            lambda own: sum(_read(each, files[each.chunk.file]) for each in own), some
        ):
            # If a thread has failed, `map` raises its error here.
            count(num_bytes)


def _pool() -> Executor:
    """Make a pool of at least two reading threads: one works while another waits for the disk."""
    return ThreadPoolExecutor(max(2, torch.get_num_threads()), thread_name_prefix="accel_fn load")


@torch.no_grad()
def _read(reading: Reading, file: int) -> int:
    """Read a part of a tensor, in place if it has the layout of the file; return the number of bytes."""
    chunk, target = reading.chunk, reading.target
    has_layout = (
        target.is_cpu
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg())
        and tuple(target.shape) == chunk.sizes
        and target.dtype == reading.dtype
    )
    source = target if has_layout else torch.empty(chunk.sizes, dtype=reading.dtype)
    view = memory_of(source)
    if read_into(view, file, chunk.start) < len(view):
        raise CheckpointError(f"load: {chunk.file} is damaged: it ends too early")
    if not has_layout:
        for dim, (start, length) in enumerate(zip(reading.start, target.shape, strict=True)):
            source = source.narrow(dim, start, length)
        target.copy_(source)
    return target.nbytes
