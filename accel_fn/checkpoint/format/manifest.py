"""Manifest: what is in a checkpoint, in which file, and with which hash."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from math import prod
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

import torch

from accel_fn.base.mesh_axes import AXES
from accel_fn.checkpoint.format.hashing import FileMark, hash_of, opened
from accel_fn.checkpoint.format.names import COMMON, file_of, step_of
from accel_fn.errors import CheckpointError, shown

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
class FrozenEntry:
    """A parameter that the checkpoint leaves out, with a hash of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    hash: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint, without the values of its tensors."""

    step: int
    call: int
    seed: int
    world_size: int
    mesh: Mapping[str, int]
    """The number of ranks along each axis, outermost first."""
    score: float | None
    accel_fn: str
    torch: str
    plans: Mapping[str, Mapping[str, Any]]
    """The signature of each step, by its name: the program that reads it must have the same."""
    tied: Mapping[str, str]
    """Another name of a tied parameter -> its first name."""
    explained: Mapping[str, str]
    """Each step as `explain` describes it."""
    entries: Mapping[str, Entry]
    frozen: Mapping[str, FrozenEntry]
    files: Mapping[str, FileMark]

    @property
    def size(self) -> int:
        return sum(mark.size for mark in self.files.values())

    def to_bytes(self) -> bytes:
        body = json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()
        return b'{"hash": "' + hash_of(body).encode() + b'", "checkpoint":\n' + body + b"}\n"


def read_manifest(checkpoint: Path) -> Manifest:
    path = checkpoint / NAME
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"load: {checkpoint} is no checkpoint: it has no {NAME}") from None
    except PermissionError:
        pass  # the next line refuses it with the reason
    with opened(path) as file, open(file, "rb", closefd=False) as stream:
        head, _, rest = stream.read().partition(b"\n")
    body = rest.removesuffix(b"}\n")
    if head != b'{"hash": "' + hash_of(body).encode() + b'", "checkpoint":' or body == rest:
        raise CheckpointError(f"load: {path} is damaged: its content is not what was written")
    try:
        found = json.loads(body)
        if isinstance(found, dict) and (version := found.pop("format", None)) != FORMAT:
            raise CheckpointError(
                f"load: {path} must be of format {FORMAT}, got {version}, written by accel_fn "
                f"{found.get('accel_fn')}; read it with that version"
            )
        if isinstance(found, dict):
            # Checkpoints may have been written before there were these fields.
            added = {
                "score": None,
                "call": 0,
                "frozen": {},
                "mesh": {"dp": found.get("world_size")},
            }
            found = {**added, **found}
        manifest: Manifest = read_as(Manifest, found, "manifest")
        here = step_of(checkpoint)
        _require(here in (None, manifest.step), "step", manifest.step, f"{here}, its folder's")
        _check_files(manifest)
        for name, entry in manifest.entries.items():
            _check_entry(name, entry, manifest.files)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"load: {path} must be one of this version, got {error}") from error
    return manifest


# Checks: a manifest that another program wrote may hold anything that JSON can.


def read_as(kind: Any, value: Any, name: str) -> Any:
    """Make a value of that type out of JSON, which has lists for tuples; an `int` is a count."""
    arguments = get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        hints: dict[str, Any] = _hints(cast("Any", kind))
        _require(value.keys() == hints.keys(), f"keys of {name}", [*value], f"{[*hints]}")
        return kind(**{key: read_as(hints[key], value[key], f"{name}.{key}") for key in hints})  # type: ignore[operator]
    if get_origin(kind) is Mapping and isinstance(value, dict):
        return {key: read_as(arguments[1], value[key], f"{name}[{key!r}]") for key in value}
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(read_as(arguments[0], each, name) for each in value)
    kinds = arguments if get_origin(kind) is UnionType else (kind,)
    fits = kind is Any or (type(value) in kinds and (kind is not int or value >= 0))
    _require(
        fits, name, value, "an integer >= 0" if kind is int else getattr(kind, "__name__", kind)
    )
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _check_files(found: Manifest) -> None:
    files, mesh, world_size = found.files, found.mesh, found.world_size
    for name in files:
        _require(name == Path(name).name, "files", name, "names of files beside it")
    _require(0 < world_size < len(files), "files", [*files], f"those of {world_size} ranks")
    for needed in (COMMON, *(file_of("rank", rank, "pt") for rank in range(world_size))):
        _require(needed in files, "files", [*files], f"names that have {needed} among them")
    fits = "dp" in mesh and mesh.keys() <= {*AXES} and prod(mesh.values()) == world_size
    _require(fits, "mesh", dict(mesh), f"of {world_size} ranks, with an axis dp")


def _check_entry(name: str, entry: Entry, files: Mapping[str, FileMark]) -> None:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype of {name}={entry.dtype!r}, which must be one of torch's")
    for chunk in entry.chunks:
        place = f"a chunk of {name}"
        _require(chunk.file in files, place, chunk.file, "in a file beside it that is listed")
        _require(_lies_in(chunk, entry.shape), place, chunk, f"a block of {list(entry.shape)}")
        length = prod(chunk.sizes) * dtype.itemsize
        _require(chunk.length == length, place, chunk, f"of {length} bytes")
        size = files[chunk.file].size
        _require(chunk.start + length <= size, place, chunk, f"in the {size} bytes of its file")
    num_held = sum(prod(chunk.sizes) for chunk in entry.chunks)
    once = num_held == prod(entry.shape)
    _require(once, f"number of elements in chunks of {name}", num_held, "all of its elements once")
    disjoint = _are_disjoint([chunk for chunk in entry.chunks if prod(chunk.sizes)])
    _require(disjoint, f"chunks of {name}", entry.chunks, "blocks that have no element in common")


def _lies_in(chunk: Chunk, shape: Sequence[int]) -> bool:
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        return False
    spans = zip(chunk.offsets, chunk.sizes, shape, strict=True)
    return all(offset + size <= whole for offset, size, whole in spans)


def _are_disjoint(blocks: Sequence[Chunk]) -> bool:
    """Return whether no two blocks overlap.

    Compared are only those that overlap along the dimension with the most different starts.
    """
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


def _require(fits: bool, name: str, value: object, rule: str) -> None:
    if not fits:
        raise ValueError(f"{name}={shown(value)}, which must be {rule}")
