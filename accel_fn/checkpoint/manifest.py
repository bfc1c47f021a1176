"""Write, read and check the manifest: the contents, files and hashes of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from math import prod
from operator import itemgetter
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

import torch

from accel_fn.checkpoint.files import FileMark, hash_of, opened
from accel_fn.checkpoint.names import COMMON, file_of, step_of
from accel_fn.core.mesh_axes import AXES
from accel_fn.errors import UNPRINTABLE, CheckpointError, printable, shown

FORMAT, _READ = 2, (1, 2)
NAME = "manifest.json"

LONGEST_NAME = 4096
_LONGEST_TEXT, _SHOWN, _LARGEST = 10**6, 100, 2**63
_NAMES = {"num_samples": "count_samples", "average": "ema", "average.uniform": "swa"}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a tensor, and the place of its bytes: row-major, `length` bytes from `start`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor: dtype without `torch.`, shape, and the chunks into which it is cut."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class FrozenEntry:
    """A tensor of which a checkpoint holds only a hash: a frozen parameter, or a frozen model's tensor."""

    dtype: str
    shape: tuple[int, ...]
    hash: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint, without the values of its tensors."""

    step: int
    call: int
    seed: int
    samples: int
    items: int | float
    world_size: int
    mesh: Mapping[str, int]
    """The number of ranks along each mesh axis, outermost first."""
    score: float | None
    accel_fn: str
    torch: str
    plans: Mapping[str, Mapping[str, Any]]
    """The signature of each step, by its name; a program that loads the checkpoint must have the
    same."""
    tied: Mapping[str, str]
    """A map from another name of a tied parameter to the parameter's first name."""
    explained: Mapping[str, str]
    """The description of each step by `explain`."""
    entries: Mapping[str, Entry]
    frozen: Mapping[str, FrozenEntry]
    files: Mapping[str, FileMark]
    format: int = FORMAT

    @property
    def size(self) -> int:
        return sum(mark.size for mark in self.files.values())

    def to_bytes(self) -> bytes:
        # A model may have many small tensors. So write the JSON without indents, which allows
        # Python's fast encoder, and a tensor in a single chunk as one list of numbers.
        whole: dict[str, dict[str, dict[str, list[int]]]] = {}
        rest: dict[str, Entry] = {}
        places: list[int] = []
        for place, (name, entry) in enumerate(self.entries.items()):
            if len(entry.chunks) == 1 and entry.chunks[0].sizes == entry.shape:
                chunk = entry.chunks[0]
                group = whole.setdefault(chunk.file, {}).setdefault(entry.dtype, {})
                group[name] = [place, chunk.start, *entry.shape]
            else:
                rest[name] = entry
                places.append(place)
        values = {"format": FORMAT} | _values(self) | {"entries": rest}
        values |= {"places": places, "whole": whole}
        body = json.dumps(values, default=_values).encode()
        return b'{"hash": "' + hash_of(body).encode() + b'", "checkpoint":\n' + body + b"}\n"


def _values(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name. Unlike `asdict`, do not copy their values."""
    return {each.name: getattr(record, each.name) for each in fields(record)}


def read_manifest(checkpoint: Path) -> Manifest:
    path = checkpoint / NAME
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"load: {checkpoint} is no checkpoint: it has no {NAME}") from None
    except PermissionError:
        pass
    # Without permission, `opened` raises an error that gives the reason.
    with opened(path) as file, open(file, "rb", closefd=False) as stream:
        head, _, rest = stream.read().partition(b"\n")
    body = rest.removesuffix(b"}\n")
    if head != b'{"hash": "' + hash_of(body).encode() + b'", "checkpoint":' or body == rest:
        raise CheckpointError(f"load: {path} is damaged: its content is not what was written")
    try:
        is_old = body[:20].lstrip(b"{ \n").startswith(b'"format": 1,')
        found = json.loads(renamed_manifest(body) if is_old else body)
        if isinstance(found, dict) and (version := found.pop("format", None)) not in _READ:
            got = [printable(f"{each}"[:_SHOWN]) for each in (version, found.get("accel_fn"))]
            raise CheckpointError(
                f"load: {path} must be of format {FORMAT}, got {got[0]}, written by accel_fn "
                f"{got[1]}; read it with that version"
            )
        if isinstance(found, dict):
            # Older checkpoints lack these fields.
            added: dict[str, Any] = {"score": None, "call": 0, "samples": 0, "items": 0}
            added |= {"frozen": {}, "mesh": {"dp": found.get("world_size")}}
            found = {**added, **found, "format": version}
            whole = _whole_entries(found.pop("whole", {}))
            places = read_as(tuple[int, ...], found.pop("places", []), "places")
        manifest: Manifest = read_as(Manifest, found, "manifest")
        manifest = replace(manifest, entries=_in_order(manifest.entries, places, whole))
        _check(manifest, step_of(checkpoint))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"load: {path} must be one of this version, got {error}") from error
    return manifest


# Checks: another program may have written any JSON into a manifest. All checks run before other
# code reads the manifest.


def read_as(kind: Any, value: Any, name: str) -> Any:
    """Convert a JSON value to type `kind`. JSON has lists for tuples; an `int` must be a count, >= 0."""
    origin, arguments, is_record = _form(kind)
    if is_record and isinstance(value, dict):
        hints: dict[str, Any] = _hints(cast("Any", kind))
        _require(value.keys() == hints.keys(), f"keys of {name}", [*value], f"{[*hints]}")
        return kind(**{key: read_as(hints[key], value[key], f"{name}.{key}") for key in hints})
    if origin is Mapping and isinstance(value, dict):
        return {key: read_as(arguments[1], value[key], f"{name}[{key!r}]") for key in value}
    if origin is tuple and isinstance(value, list):
        # A model may have very many shapes and offsets, so check integers here, without a call for
        # each.
        if arguments[0] is int and all(
            type(each) is int and 0 <= each < _LARGEST for each in value
        ):
            return tuple(value)
        return tuple(read_as(arguments[0], each, name) for each in value)
    kinds = arguments if origin is UnionType else (kind,)
    fits = kind is Any or (type(value) in kinds and (kind is not int or 0 <= value < _LARGEST))
    rule = "an integer >= 0 and < 2**63" if kind is int else getattr(kind, "__name__", kind)
    _require(fits, name, value, rule)
    return value


def _whole_entries(found: Any) -> dict[str, tuple[int, Entry]]:
    """Rebuild the entries of tensors in a single chunk, each with its place among all entries.

    `found` maps file, dtype and name to [place, start, *shape].
    """
    entries: dict[str, tuple[int, Entry]] = {}
    kind: Any = Mapping[str, Mapping[str, Mapping[str, Any]]]
    for file, dtypes in read_as(kind, found, "whole").items():
        for dtype, tensors in dtypes.items():
            itemsize = _dtype_of(dtype, "whole").itemsize
            for name, place in tensors.items():
                _require(name not in entries, "tensors", [name], "listed once")
                numbers = read_as(tuple[int, ...], place, "whole")
                _require(len(numbers) > 1, "place of a tensor", place, "its place, start and sizes")
                start, shape = numbers[1], numbers[2:]
                chunk = Chunk((0,) * len(shape), shape, file, start, prod(shape) * itemsize)
                entries[name] = numbers[0], Entry(dtype, shape, (chunk,))
    return entries


def _in_order(
    entries: Mapping[str, Entry], places: Sequence[int], whole: Mapping[str, tuple[int, Entry]]
) -> dict[str, Entry]:
    """Join the entries of tensors in one and in several chunks, in the order of the save."""
    twice = [*(entries.keys() & whole.keys())]
    _require(not twice, "tensors", twice, "listed once")
    places = places or range(len(entries))
    _require(len(places) == len(entries), "places", places, f"of {len(entries)} tensors")
    every = [*zip(places, entries.items(), strict=True)]
    every += [(place, (name, entry)) for name, (place, entry) in whole.items()]
    return dict(item for _, item in sorted(every, key=itemgetter(0)))


def _dtype_of(name: str, place: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype of {place}={shown(name)}, which must be one of torch's")
    return dtype


@cache
def _form(kind: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Return the origin and the arguments of a type, and whether it is a dataclass."""
    return get_origin(kind), get_args(kind), is_dataclass(kind)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _check(found: Manifest, here: int | None) -> None:
    """Refuse a manifest that contradicts itself or its folder, or that `save` cannot write."""
    _require(here in (None, found.step), "step", found.step, f"{here}, its folder's")
    for name in (found.accel_fn, found.torch, *found.plans, *found.explained):
        _check_name("name", name)
    for name in (*found.entries, *found.frozen, *found.tied, *found.tied.values()):
        _check_name("name of a tensor", name)
    _check_texts([*found.explained.values(), *found.plans.values()])
    _check_files(found)
    for name, entry in found.entries.items():
        _check_entry(name, entry, found.files)
    _check_places(found.entries)
    twice = [
        *(found.entries.keys() & found.frozen.keys()),
        *(found.entries.keys() & found.tied.keys()),
    ]
    _require(not twice, "tensors", twice, "saved, left out, or another's, and not two of these")


def _check_name(what: str, name: str) -> None:
    fits = len(name) <= LONGEST_NAME and not UNPRINTABLE.search(name)
    _require(fits, what, name, f"of at most {LONGEST_NAME} characters that can be printed")


def _check_texts(values: Any) -> None:
    """Refuse long texts, which errors would print, in containers of any depth."""
    if isinstance(values, str):
        _require(
            len(values) <= _LONGEST_TEXT, "text", values, f"at most {_LONGEST_TEXT} characters"
        )
    elif isinstance(values, list | dict):
        for each in values:
            _check_texts(each)
            if isinstance(values, dict):
                _check_texts(values[each])


def _check_files(found: Manifest) -> None:
    files, mesh, world_size = found.files, found.mesh, found.world_size
    for name in files:
        _require(name == Path(name).name, "files", name, "names of files beside it")
    _require(0 < world_size < len(files), "files", [*files], f"those of {world_size} ranks")
    needed = [COMMON, *(file_of("rank", rank, "pt") for rank in range(world_size))]
    for name in needed:
        _require(name in files, "files", [*files], f"names that have {name} among them")
    of_tensors = {file_of("tensors", rank, "bin") for rank in range(world_size)}
    for name in files.keys() - {*needed}:
        _require(name in of_tensors, "files", name, "a file of the ranks' tensors")
    fits = "dp" in mesh and mesh.keys() <= {*AXES} and prod(mesh.values()) == world_size
    _require(fits, "mesh", dict(mesh), f"of {world_size} ranks, with an axis dp")


def _check_entry(name: str, entry: Entry, files: Mapping[str, FileMark]) -> None:
    dtype = _dtype_of(entry.dtype, name)
    largest = prod(filter(None, entry.shape))
    _require(largest < _LARGEST, f"shape of {name}", entry.shape, "one that torch can make")
    for chunk in entry.chunks:
        place = f"a chunk of {name}"
        is_listed = chunk.file in files and chunk.file.startswith("tensors_")
        _require(is_listed, place, chunk.file, "in a file beside it that is listed, of tensors")
        _require(_lies_in(chunk, entry.shape), place, chunk, f"a block of {list(entry.shape)}")
        length = prod(chunk.sizes) * dtype.itemsize
        _require(chunk.length == length, place, chunk, f"of {length} bytes")
        size = files[chunk.file].size
        _require(chunk.start + length <= size, place, chunk, f"in the {size} bytes of its file")
    if len(entry.chunks) == 1 and entry.chunks[0].sizes == entry.shape:
        return
    num_held = sum(prod(chunk.sizes) for chunk in entry.chunks)
    once = num_held == prod(entry.shape)
    _require(once, f"number of elements in chunks of {name}", num_held, "all of its elements once")
    disjoint = _are_disjoint([chunk for chunk in entry.chunks if prod(chunk.sizes)])
    _require(disjoint, f"chunks of {name}", entry.chunks, "blocks that have no element in common")


def _check_places(entries: Mapping[str, Entry]) -> None:
    """Refuse a manifest in which bytes of a file belong to two tensors."""
    spans = sorted(
        (chunk.file, chunk.start, chunk.start + chunk.length, name)
        for name, entry in entries.items()
        for chunk in entry.chunks
        if chunk.length
    )
    for (file, _, end, name), (next_file, start, _, next_name) in pairwise(spans):
        both, rule = [name, next_name], "in places of their own"
        _require(file != next_file or end <= start, f"tensors in {file}", both, rule)


def _lies_in(chunk: Chunk, shape: Sequence[int]) -> bool:
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        return False
    spans = zip(chunk.offsets, chunk.sizes, shape, strict=True)
    return all(offset + size <= whole for offset, size, whole in spans)


def _are_disjoint(blocks: Sequence[Chunk]) -> bool:
    """Return whether no two blocks overlap.

    To save comparisons, only blocks that overlap along one dimension are compared: the dimension
    with the most different starts.
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
        where = name if len(name) <= LONGEST_NAME else shown(name)
        raise ValueError(f"{where}={shown(value)}, which must be {rule}")


def renamed_manifest(body: bytes) -> bytes:
    """Replace old function names in the manifest by new ones, also in the names of tensors."""
    for old, new in _NAMES.items():
        body = body.replace(f'"{old}"'.encode(), f'"{new}"'.encode())
        body = body.replace(f" {old}/".encode(), f" {new}/".encode())
    return body


def renamed_rest(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Replace old transform names in a step's non-tensor state by new ones."""
    places = {place: place.rpartition(" ") for place in rest["transforms"]}
    new = {place: f"{at}{gap}{_NAMES.get(name, name)}" for place, (at, gap, name) in places.items()}
    return {**rest, "transforms": {new[at]: values for at, values in rest["transforms"].items()}}
