"""Reading tensors out of a checkpoint, in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from accel_fn._errors import CheckpointError
from accel_fn.checkpoint._hashing import check_file, memory_of
from accel_fn.checkpoint._manifest import Entry, Manifest
from accel_fn.checkpoint._planning import Reading, plan_readings


def check_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Some of the files against their hashes."""
    for name in names:
        check_file(path / name, manifest.files[name])


def read_tensors(path: Path, tensors: Mapping[str, Tensor], entries: Mapping[str, Entry]) -> None:
    """Overwrite these tensors by those that were saved under their names."""
    with ExitStack() as files:
        opened: dict[str, IO[bytes]] = {}
        for reading in plan_readings(tensors, entries):
            name = reading.chunk.file
            if name not in opened:
                opened[name] = files.enter_context((path / name).open("rb", buffering=0))
            _read(reading, opened[name])


def _read(reading: Reading, file: IO[bytes]) -> None:
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
    file.seek(chunk.start)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"load: {file.name} is damaged: it ends too early")
        done += count
    if not alike:
        for dimension, (start, length) in enumerate(zip(reading.start, target.shape, strict=True)):
            source = source.narrow(dimension, start, length)
        target.copy_(source)
