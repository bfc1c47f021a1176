"""Files that are written and read together with their hash."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from accel_fn.base.raw_bytes import bytes_of
from accel_fn.checkpoint.weights.entries import extra
from accel_fn.errors import CheckpointError

_BLOCK = 1 << 24
_PIECE = 1 << 19  # is still in the processor's cache when it is hashed


@dataclass(frozen=True, slots=True)
class FileMark:
    """What a file must be: its size in bytes, and a hash of its content.

    That is the XXH3-128 of the XXH3-128 of each block of 16 MiB: blocks are read in parallel.
    """

    size: int
    hash: str


def check_hashing(function: str) -> None:
    """Is the library here that makes hashes?"""
    extra(function, "xxhash")


def new_hash() -> Any:
    """An XXH3-128: it reads memory faster than a disk does; for damage, not against forgery."""
    return extra("save", "xxhash").xxh3_128()


def hash_of(data: bytes | memoryview) -> str:
    """Of all of it."""
    running = new_hash()
    running.update(data)
    return str(running.hexdigest())


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileMark:
    """Write a file, to the disk; give back its mark."""
    size, digests, running = 0, [], new_hash()
    with path.open("xb", buffering=0) as file:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                piece = view[: min(_PIECE, _BLOCK - size % _BLOCK)]
                running.update(piece)
                _write_all(file, piece)
                view, size = view[len(piece) :], size + len(piece)
                if size % _BLOCK == 0:
                    digests.append(running.digest())
                    running.reset()
        os.fsync(file.fileno())
    if size % _BLOCK:
        digests.append(running.digest())
    return FileMark(size, hash_of(b"".join(digests)))


def _write_all(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def check_file(path: Path, mark: FileMark, pool: Executor) -> None:
    """Read a file to its end, and refuse it if it is not what was written."""
    try:
        number = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(number).st_size
            starts, own = range(0, size, _BLOCK), _Own()
            mapped = pool.map if len(starts) > 1 else map  # small files: without starting threads
            digests = mapped(lambda start: _digest(number, start, own.room), starts)
            found = hash_of(b"".join(digests))
        finally:
            os.close(number)
    except FileNotFoundError:
        raise CheckpointError(f"load: a file of the checkpoint is missing: {path}") from None
    except OSError as error:
        raise cannot_read(path, error) from error
    if size != mark.size:
        raise CheckpointError(
            f"load: {path} is damaged: it must have {mark.size} bytes, got {size}"
        )
    if found != mark.hash:
        raise CheckpointError(f"load: {path} is damaged: its content is not what was written")


def cannot_read(path: Path, error: OSError) -> CheckpointError:
    """What to tell of a file of a checkpoint that is there and cannot be read."""
    return CheckpointError(f"load: {path} must be a file that can be read ({error.strerror})")


class _Own(threading.local):
    """What each thread that hashes has to read into: whole pages.

    Some processors take five times as long to copy to a few bytes past the start of a page.
    """

    def __init__(self) -> None:
        self.room = memoryview(mmap.mmap(-1, _PIECE))


def _digest(number: int, start: int, room: memoryview) -> bytes:
    """Of the block of an open file that starts there."""
    running = new_hash()
    for place in range(start, start + _BLOCK, _PIECE):
        done = read_into(room, number, place)
        running.update(room[:done])
        if done < _PIECE:
            break
    return running.digest()  # type: ignore[no-any-return]


def read_into(room: memoryview, number: int, start: int) -> int:
    """Fill it from an open file, from a place on; how many bytes there were."""
    done = 0
    while done < len(room):
        count = os.preadv(number, [room[done:]], start + done)
        if not count:
            break
        done += count
    return done


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(cast("Any", bytes_of(tensor).numpy()))
