"""Reading a checkpoint: its files against their hashes, its tensors in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from accel_fn.checkpoint.format.hashing import check_file, memory_of, opened, read_into, uncounted
from accel_fn.checkpoint.format.manifest import Entry, Manifest
from accel_fn.checkpoint.format.shard_plan import Reading, plan_readings
from accel_fn.errors import CheckpointError

_AT_A_TIME = 16


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
        # Some at a time: a thread takes longer to begin than to read a small tensor.
        some = [readings[at : at + _AT_A_TIME] for at in range(0, len(readings), _AT_A_TIME)]
        for num_bytes in pool.map(
            lambda own: sum(_read(each, files[each.chunk.file]) for each in own), some
        ):
            count(num_bytes)  # an error of a thread is raised here


def _pool() -> Executor:
    """Start threads that read: at least two, since one may wait for a disk."""
    return ThreadPoolExecutor(max(2, torch.get_num_threads()), thread_name_prefix="accel_fn load")


@torch.no_grad()
def _read(reading: Reading, file: int) -> int:
    """Fill a part of a tensor, in place where memory has the layout of the file; return its bytes."""
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
