"""Does a manifest make sense? One of somebody else's may hold anything, where JSON has a place for it."""

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
    """Raise a ValueError that names what does not."""
    for name, least in (("step", 0), ("seed", 0), ("world_size", 1)):
        value = getattr(found, name)
        _hold(_is_count(value, least), name, value, f"an integer >= {least}")
    for name in ("accel_fn", "torch"):
        value = getattr(found, name)
        _hold(isinstance(value, str), name, value, "text")
    for name in ("tied", "explained"):
        value = getattr(found, name)
        texts = isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
        _hold(texts, name, value, "text by names")
    plans = isinstance(found.plans, dict) and all(
        isinstance(each, dict) for each in found.plans.values()
    )
    _hold(plans, "plans", found.plans, "dicts by names")
    _check_files(found.files, found.world_size)
    for name, entry in found.entries.items():
        _check_entry(name, entry, found.files)


def _check_files(files: Mapping[str, FileMark], world_size: int) -> None:
    for name, mark in files.items():
        _hold(name == Path(name).name, "files", name, "names of files beside it")
        fits = _is_count(mark.size, 0) and isinstance(mark.hash, str)
        _hold(fits, f"files[{name!r}]", mark, "a size >= 0 and a hash")
    _hold(world_size < len(files), "files", [*files], f"those of {world_size} ranks")
    for needed in (COMMON, *(file_of("rank", rank, "pt") for rank in range(world_size))):
        _hold(needed in files, "files", [*files], f"names that have {needed} among them")


def _check_entry(name: str, entry: Entry, files: Mapping[str, FileMark]) -> None:
    dtype = getattr(torch, entry.dtype, None) if isinstance(entry.dtype, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype of {name}={entry.dtype!r}, which must be one of torch's")
    _hold(_are_counts(entry.shape), f"shape of {name}", entry.shape, "integers >= 0")
    for chunk in entry.chunks:
        place = f"a chunk of {name}"
        _hold(chunk.file in files, place, chunk.file, "in a file beside it that is listed")
        _hold(_lies_in(chunk, entry), place, chunk, f"a block of {list(entry.shape)}")
        length = prod(chunk.sizes) * dtype.itemsize
        _hold(chunk.length == length, place, chunk, f"of {length} bytes")
        inside = _is_count(chunk.start, 0) and chunk.start + length <= files[chunk.file].size
        _hold(inside, place, chunk, f"in the {files[chunk.file].size} bytes of its file")
    num_held = sum(prod(chunk.sizes) for chunk in entry.chunks)
    once = num_held == prod(entry.shape)
    _hold(once, f"number of elements in chunks of {name}", num_held, "all of its elements once")
    apart = _are_apart(entry.chunks)
    _hold(apart, f"chunks of {name}", entry.chunks, "blocks that have no element in common")


def _are_apart(chunks: Sequence[Chunk]) -> bool:
    """Compared are those alone that reach each other along the axis on which most begin apart."""
    blocks = [chunk for chunk in chunks if prod(chunk.sizes)]
    if len(blocks) < 2:
        return True
    starts = [len(set(axis)) for axis in zip(*(block.offsets for block in blocks), strict=True)]
    axis = starts.index(max(starts))
    reaching: list[Chunk] = []
    for block in sorted(blocks, key=lambda block: block.offsets[axis]):
        start = block.offsets[axis]
        reaching = [each for each in reaching if each.offsets[axis] + each.sizes[axis] > start]
        if any(_meet(each, block) for each in reaching):
            return False
        reaching.append(block)
    return True


def _meet(one: Chunk, other: Chunk) -> bool:
    spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(mine < its + width and its < mine + size for mine, size, its, width in spans)


def _lies_in(chunk: Chunk, entry: Entry) -> bool:
    """Is the chunk a block of that tensor?"""
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


def _hold(fits: bool, name: str, value: object, rule: str) -> None:
    if not fits:
        raise ValueError(f"{name}={value!r}, which must be {rule}")
