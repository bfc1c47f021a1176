"""Reading a checkpoint: its files against their hashes, its tensors in place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from accel_fn.checkpoint.format.hashing import check_file, memory_of, read_into
from accel_fn.checkpoint.format.manifest import Entry, Manifest
from accel_fn.checkpoint.format.shard_plan import Reading, plan_readings
from accel_fn.errors import CheckpointError


def check_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Some of the files against their hashes."""
    with _pool() as pool:
        for name in names:
            check_file(path / name, manifest.files[name], pool)


def read_tensors(path: Path, tensors: Mapping[str, Tensor], entries: Mapping[str, Entry]) -> None:
    """Overwrite these tensors by those that were saved under their names."""
    readings = list(plan_readings(tensors, entries))
    with ExitStack() as files, _pool() as pool:
        opened: dict[str, int] = {}
        for name in {reading.chunk.file for reading in readings}:
            opened[name] = os.open(path / name, os.O_RDONLY)
            files.callback(os.close, opened[name])
        for _ in pool.map(lambda reading: _read(reading, opened[reading.chunk.file]), readings):
            pass  # an error of a thread is raised here


def _pool() -> Executor:
    """Threads that read: two at least, since one may wait for a disk."""
    return ThreadPoolExecutor(max(2, torch.get_num_threads()), thread_name_prefix="accel_fn load")


@torch.no_grad()
def _read(reading: Reading, file: int) -> None:
    """Fill a part of a tensor, in place where memory and file are laid out alike."""
    chunk, target = reading.chunk, reading.target
    alike = (
        target.is_cpu
        and target.is_contiguous()
        and tuple(target.shape) == chunk.sizes
        and target.dtype == reading.dtype
    )
    source = target if alike else torch.empty(chunk.sizes, dtype=reading.dtype)
    view = memory_of(source)
    if read_into(view, file, chunk.start) < len(view):
        raise CheckpointError(f"load: {chunk.file} is damaged: it ends too early")
    if not alike:
        for dimension, (start, length) in enumerate(zip(reading.start, target.shape, strict=True)):
            source = source.narrow(dimension, start, length)
        target.copy_(source)
