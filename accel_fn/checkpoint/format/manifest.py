"""Manifest: what is in a checkpoint, in which file, and with which hash."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accel_fn.checkpoint.format.hashing import FileMark, check_hashing, hash_of, read_error
from accel_fn.checkpoint.format.manifest_checks import check_manifest
from accel_fn.errors import CheckpointError

FORMAT = 1
NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a tensor, and where its bytes are: row-major, `length` of them from `start`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor: dtype without `torch.`, shape, and the chunks that it is cut into."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of a checkpoint but the values of its tensors."""

    step: int
    seed: int
    world_size: int
    accel_fn: str
    torch: str
    plans: Mapping[str, Mapping[str, Any]]
    """What must be the same in the program that reads it, by the name of the Step."""
    tied: Mapping[str, str]
    """Names of parameters that are another's, and that other's name."""
    explained: Mapping[str, str]
    """Each step as `explain` prints it."""
    entries: Mapping[str, Entry]
    files: Mapping[str, FileMark]

    @property
    def size(self) -> int:
        """Sum the bytes of all files but this one."""
        return sum(mark.size for mark in self.files.values())

    def to_bytes(self) -> bytes:
        """Write JSON, the hash of the rest in its first line."""
        body = json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()
        return b'{"hash": "' + hash_of(body).encode() + b'", "checkpoint":\n' + body + b"}\n"


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check it."""
    path = checkpoint / NAME
    check_hashing("load")
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"load: {checkpoint} is no checkpoint: it has no {NAME}") from None
    except OSError as error:
        raise read_error(path, error) from error
    head, _, rest = data.partition(b"\n")
    body = rest.removesuffix(b"}\n")
    if head != b'{"hash": "' + hash_of(body).encode() + b'", "checkpoint":' or body == rest:
        raise CheckpointError(f"load: {path} is damaged: its content is not what was written")
    try:
        return _from_json(path, json.loads(body))
    except ValueError as error:
        raise CheckpointError(f"load: {path} must be one of this version, got {error}") from error
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise CheckpointError(f"load: {path} must be one of this version, got {error!r}") from error


def _from_json(path: Path, found: dict[str, Any]) -> Manifest:
    version = found.pop("format", None)
    if version != FORMAT:
        raise CheckpointError(
            f"load: {path} must be of format {FORMAT}, got {version}, written by accel_fn "
            f"{found.get('accel_fn')}; read it with that version"
        )
    entries = {name: _entry(**entry) for name, entry in found.pop("entries").items()}
    files = {name: FileMark(**mark) for name, mark in found.pop("files").items()}
    manifest = Manifest(entries=entries, files=files, **found)
    check_manifest(manifest)
    return manifest


def _entry(dtype: str, shape: Sequence[int], chunks: Sequence[dict[str, Any]]) -> Entry:
    return Entry(dtype, tuple(shape), tuple(map(chunk_from, chunks)))


def chunk_from(found: Mapping[str, Any]) -> Chunk:
    """Make a chunk out of JSON, which has lists for tuples."""
    offsets, sizes = tuple(found["offsets"]), tuple(found["sizes"])
    return Chunk(**{**found, "offsets": offsets, "sizes": sizes})
