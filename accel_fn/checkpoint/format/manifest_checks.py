"""check_manifest: a manifest that others wrote may hold anything that JSON can."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from accel_fn.checkpoint.format.hashing import FileMark
from accel_fn.checkpoint.format.names import COMMON, file_of

if TYPE_CHECKING:
    from accel_fn.checkpoint.format.manifest import Chunk, Entry, Manifest


def check_manifest(found: Manifest) -> None:
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
