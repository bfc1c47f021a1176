"""Write, hash, check and read files, and convert plain data to bytes and back."""

from __future__ import annotations

import errno
import io
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch import Tensor

from accel_fn.core.primitives import bytes_of
from accel_fn.errors import ArgumentError, CheckpointError

_BLOCK = 1 << 24
_NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
# The size of a piece in bytes. A piece this small stays in the processor's cache between its hash
# and its read or write.
_PIECE = 1 << 19


@dataclass(frozen=True, slots=True)
class FileMark:
    """The mark of a file: its size in bytes, and a hash of its content.

    The hash is the XXH3-128 of the XXH3-128s of the file's blocks of 16 MiB, so that threads can read
    and hash blocks in parallel.
    """

    size: int
    hash: str


def hash_of(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128(data).hexdigest()


def uncounted(num_bytes: int) -> None:
    """Ignore a number of bytes: the default `count` function."""


def write_file(
    path: Path,
    parts: Iterable[bytes | memoryview],
    count: Callable[[int], object] = uncounted,
) -> FileMark:
    """Write a new file, wait until it is on the disk, and return its mark."""
    size, digests, running = 0, [], xxhash.xxh3_128()
    with path.open("xb", buffering=0) as file:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                piece = view[: min(_PIECE, _BLOCK - size % _BLOCK)]
                running.update(piece)
                write_all(file, piece)
                count(len(piece))
                view, size = view[len(piece) :], size + len(piece)
                if size % _BLOCK == 0:
                    digests.append(running.digest())
                    running.reset()
        os.fsync(file.fileno())
    if size % _BLOCK:
        digests.append(running.digest())
    return FileMark(size, hash_of(b"".join(digests)))


def write_all(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def sync(path: Path) -> None:
    """Wait until a file is on the disk; for a folder, its list of names, if the file system can sync it."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in _NO_FSYNC or not path.is_dir():
            raise
    finally:
        os.close(opened)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents; wait until the names of all new folders are on the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync(each.parent)


@contextmanager
def opened(path: Path, function: str = "load") -> Iterator[int]:
    """Open a checkpoint's file to read it. Refuse a file that is not regular; do not wait for a pipe."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise CheckpointError(f"{function}: {path} must be a regular file")
            yield file
        finally:
            os.close(file)
    except FileNotFoundError:
        raise CheckpointError(f"{function}: a file of the checkpoint is missing: {path}") from None
    except OSError as error:
        rule = f"must be a file that can be read ({error.strerror})"
        raise CheckpointError(f"{function}: {path} {rule}") from error


def check_file(
    path: Path, mark: FileMark, pool: Executor, count: Callable[[int], object] = uncounted
) -> None:
    """Read a file to its end, and refuse it if its content differs from its mark."""
    with opened(path) as file:
        size, buffers, digests = os.fstat(file).st_size, _Buffers(), []
        starts = range(0, size, _BLOCK)
        # `pool.map` starts threads, and a small file is not worth them.
        mapped = pool.map if len(starts) > 1 else map
        found = mapped(lambda start: _digest(file, start, buffers.piece), starts)
        for start, digest in zip(starts, found, strict=True):
            digests.append(digest)
            count(min(_BLOCK, size - start))
    if hash_of(b"".join(digests)) != mark.hash:
        raise CheckpointError(f"load: {path} is damaged: its content is not what was written")


class _Buffers(threading.local):
    """A buffer for each thread that hashes; it begins at the start of a page.

    Some processors take five times as long to copy to an address a few bytes after the start of a
    page.
    """

    def __init__(self) -> None:
        self.piece = memoryview(mmap.mmap(-1, _PIECE))


def _digest(file: int, start: int, buffer: memoryview) -> bytes:
    running = xxhash.xxh3_128()
    for place in range(start, start + _BLOCK, _PIECE):
        done = read_into(buffer, file, place)
        running.update(buffer[:done])
        if done < _PIECE:
            break
    return running.digest()


def read_into(buffer: memoryview, file: int, start: int) -> int:
    """Fill a buffer from a place in an open file; return how many bytes the file had there."""
    done = 0
    while done < len(buffer):
        count = os.preadv(file, [buffer[done:]], start + done)
        if not count:
            break
        done += count
    return done


def hash_of_tensor(tensor: Tensor) -> str:
    """Hash the bytes of a whole tensor."""
    return hash_of(memory_of(tensor.cpu().resolve_conj().resolve_neg().contiguous()))


def memory_of(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(cast("Any", bytes_of(tensor).numpy()))


def to_plain(values: Mapping[str, Any], function: str) -> bytes:
    """Convert values to a file's content; refuse values that cannot be read back without running code."""
    buffer = io.BytesIO()
    try:
        torch.save(dict(values), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        names = list(values)
        if len(names) > 1:
            # Convert each value alone, so that the error names only the first one at fault.
            for name in names:
                to_plain({name: values[name]}, function)
        raise ArgumentError(
            f"{function}: {', '.join(names)} must hold tensors, numbers, strings and "
            f"containers of them, got something else; {_first_line(error)}"
        ) from None
    return buffer.getvalue()


def from_plain(path: Path, function: str) -> Any:
    with opened(path, function) as file, open(file, "rb", closefd=False) as stream:
        try:
            return torch.load(stream, weights_only=True, map_location="cpu")
        except Exception as error:
            raise CheckpointError(
                f"{function}: {path} must hold tensors and plain data, got something else; "
                f"{_first_line(error)}"
            ) from error


def dict_from_plain(path: Path, keys: Set[str], function: str) -> dict[str, Any]:
    """Read a file that holds a dict with at least these keys."""
    found = from_plain(path, function)
    if not isinstance(found, dict) or not keys <= found.keys():
        raise CheckpointError(f"{function}: {path} must hold {', '.join(sorted(keys))}")
    return found


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line]
    return (lines or str(error).splitlines() or [""])[0].strip()
