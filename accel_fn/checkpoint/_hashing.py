"""Files that are written and read together with their hash."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from accel_fn._errors import CheckpointError

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class FileMark:
    """What a file must be: its size in bytes, and the XXH3-128 of its content."""

    size: int
    hash: str


def new_hash() -> Any:
    """An XXH3-128: it reads memory faster than a disk does; for damage, not against forgery."""
    try:
        return importlib.import_module("xxhash").xxh3_128()
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'save: {error.name} must be installed; pip install "accel-fn[checkpoint]"',
            name=error.name,
        ) from None


def hash_of(data: bytes | memoryview) -> str:
    """Of all of it."""
    running = new_hash()
    running.update(data)
    return str(running.hexdigest())


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileMark:
    """Write a file, to the disk; give back its mark."""
    running, size = new_hash(), 0
    with path.open("xb", buffering=0) as file:
        for part in parts:
            view = memoryview(part).cast("B")
            for block in _blocks(view):
                running.update(block)
                written = 0
                while written < len(block):
                    written += file.write(block[written:]) or 0
            size += len(view)
        os.fsync(file.fileno())
    return FileMark(size, running.hexdigest())


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def check_file(path: Path, mark: FileMark) -> None:
    """Read a file to its end, and refuse it if it is not what was written."""
    running, size = new_hash(), 0
    block = bytearray(_BLOCK)
    view = memoryview(block)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block) or 0:
                running.update(view[:count])
                size += count
    except FileNotFoundError:
        raise CheckpointError(f"load: a file of the checkpoint is missing: {path}") from None
    if size != mark.size:
        raise CheckpointError(
            f"load: {path} is damaged: it must have {mark.size} bytes, got {size}"
        )
    if running.hexdigest() != mark.hash:
        raise CheckpointError(f"load: {path} is damaged: its content is not what was written")


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(cast("Any", tensor.view(-1).view(torch.uint8).numpy()))


def _blocks(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), _BLOCK):
        yield view[start : start + _BLOCK]
