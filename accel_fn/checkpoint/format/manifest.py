"""Manifest: what is in a checkpoint, in which file, and with which hash."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from accel_fn.checkpoint.format.hashing import FileMark, check_hashing, hash_of, read_error
from accel_fn.checkpoint.format.names import COMMON, file_of
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
    """The signature of each step, by its name: the program that reads it must have the same."""
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
    _check_manifest(manifest)
    return manifest


def _entry(dtype: str, shape: Sequence[int], chunks: Sequence[dict[str, Any]]) -> Entry:
    return Entry(dtype, tuple(shape), tuple(map(chunk_from, chunks)))


def chunk_from(found: Mapping[str, Any]) -> Chunk:
    """Make a chunk out of JSON, which has lists for tuples."""
    offsets, sizes = tuple(found["offsets"]), tuple(found["sizes"])
    return Chunk(**{**found, "offsets": offsets, "sizes": sizes})


# Checks: a manifest that others wrote may hold anything that JSON can.


def _check_manifest(found: Manifest) -> None:
    """Raise a ValueError that names what makes no sense."""
    for name, least in (("step", 0), ("seed", 0), ("world_size", 1)):
        value = getattr(found, name)
        _require(_is_count(value, least), name, value, f"an integer >= {least}")
    for name in ("accel_fn", "torch"):
        value = getattr(found, name)
        _require(isinstance(value, str), name, value, "text")
    for name, kind, rule in (
        ("tied", str, "text by names"),
        ("explained", str, "text by names"),
        ("plans", dict, "dicts by names"),
    ):
        value = getattr(found, name)
        fits = isinstance(value, dict) and all(isinstance(each, kind) for each in value.values())
        _require(fits, name, value, rule)
    _check_files(found.files, found.world_size)
    for name, entry in found.entries.items():
        _check_entry(name, entry, found.files)


def _check_files(files: Mapping[str, FileMark], world_size: int) -> None:
    for name, mark in files.items():
        _require(name == Path(name).name, "files", name, "names of files beside it")
        fits = _is_count(mark.size, 0) and isinstance(mark.hash, str)
        _require(fits, f"files[{name!r}]", mark, "a size >= 0 and a hash")
    _require(world_size < len(files), "files", [*files], f"those of {world_size} ranks")
    for needed in (COMMON, *(file_of("rank", rank, "pt") for rank in range(world_size))):
        _require(needed in files, "files", [*files], f"names that have {needed} among them")


def _check_entry(name: str, entry: Entry, files: Mapping[str, FileMark]) -> None:
    dtype = getattr(torch, entry.dtype, None) if isinstance(entry.dtype, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype of {name}={entry.dtype!r}, which must be one of torch's")
    _require(_are_counts(entry.shape), f"shape of {name}", entry.shape, "integers >= 0")
    for chunk in entry.chunks:
        place = f"a chunk of {name}"
        _require(chunk.file in files, place, chunk.file, "in a file beside it that is listed")
        _require(_lies_in(chunk, entry), place, chunk, f"a block of {list(entry.shape)}")
        length = prod(chunk.sizes) * dtype.itemsize
        _require(chunk.length == length, place, chunk, f"of {length} bytes")
        inside = _is_count(chunk.start, 0) and chunk.start + length <= files[chunk.file].size
        _require(inside, place, chunk, f"in the {files[chunk.file].size} bytes of its file")
    num_held = sum(prod(chunk.sizes) for chunk in entry.chunks)
    once = num_held == prod(entry.shape)
    _require(once, f"number of elements in chunks of {name}", num_held, "all of its elements once")
    disjoint = _are_disjoint(entry.chunks)
    _require(disjoint, f"chunks of {name}", entry.chunks, "blocks that have no element in common")


def _are_disjoint(chunks: Sequence[Chunk]) -> bool:
    """Return whether no two blocks overlap.

    Compared are only those that overlap along the dimension with the most different starts.
    """
    blocks = [chunk for chunk in chunks if prod(chunk.sizes)]
    if len(blocks) < 2:
        return True
    starts = [len(set(each)) for each in zip(*(block.offsets for block in blocks), strict=True)]
    dim = starts.index(max(starts))
    open_blocks: list[Chunk] = []
    for block in sorted(blocks, key=lambda block: block.offsets[dim]):
        start = block.offsets[dim]
        open_blocks = [each for each in open_blocks if each.offsets[dim] + each.sizes[dim] > start]
        if any(_overlap(each, block) for each in open_blocks):
            return False
        open_blocks.append(block)
    return True


def _overlap(one: Chunk, other: Chunk) -> bool:
    spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in spans)


def _lies_in(chunk: Chunk, entry: Entry) -> bool:
    return (
        _are_counts((*chunk.offsets, *chunk.sizes))
        and len(chunk.offsets) == len(chunk.sizes) == len(entry.shape)
        and all(
            offset + size <= whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)
        )
    )


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_counts(values: Iterable[object]) -> bool:
    return all(_is_count(each, 0) for each in values)


def _require(fits: bool, name: str, value: object, rule: str) -> None:
    if not fits:
        raise ValueError(f"{name}={value!r}, which must be {rule}")
