"""Weights as files: how tensors are dealt to shards, and how a set of files takes another's place."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from accel_fn.checkpoint.format.hashing import sync
from accel_fn.checkpoint.weights.entries import Entries, extra
from accel_fn.errors import CheckpointWriteError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TIED = "accel_fn.tied"
"""Under which a file's metadata tell the other names of its tensors."""

_WRITTEN_HERE = re.compile(
    r"model(\.new-[0-9a-f]{8})?\.safetensors"
    r"|model-\d{5,}-of-\d{5,}(\.new-[0-9a-f]{8})?\.safetensors"
    r"|model\.safetensors\.index(\.new-[0-9a-f]{8})?\.json"
)


def write_set(folder: Path, entries: Entries, limit: int) -> None:
    """Write the entries as one set of files, which takes the place of the one that was there."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = _deal(entries.tensors, limit)
    names = _names(len(shards))
    token = secrets.token_hex(4)
    beside = [_beside(name, token) for name in names]
    try:
        for name, keys in zip(beside, shards, strict=True):
            _write_shard(folder / name, keys, entries)
    except BaseException:
        for name in beside:
            (folder / name).unlink(missing_ok=True)
        raise
    sync(folder)
    if len(shards) == 1:
        os.replace(folder / beside[0], folder / SINGLE)
        sync(folder)
        _remove_others(folder, {SINGLE})
    else:
        _publish(folder, shards, beside, names, _num_bytes(entries.tensors))
        _remove_others(folder, {INDEX, *names})


def _deal(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """The keys of each shard, in order; a tensor above the limit is alone."""
    shards: list[list[str]] = [[]]
    size = 0
    for key, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += tensor.nbytes
    return shards


def _names(num_shards: int) -> list[str]:
    if num_shards == 1:
        return [SINGLE]
    return [f"model-{at:05d}-of-{num_shards:05d}.safetensors" for at in range(1, num_shards + 1)]


def _beside(name: str, token: str) -> str:
    stem, _, kind = name.rpartition(".")
    return f"{stem}.new-{token}.{kind}"


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _write_shard(path: Path, keys: Sequence[str], entries: Entries) -> None:
    """One safetensors file, on the disk when this returns."""
    held = {
        key: entries.tensors[key].as_subclass(Tensor).resolve_conj().resolve_neg().contiguous()
        for key in keys
    }
    tied = {name: first for name, first in entries.tied.items() if first in held}
    metadata = {"format": "pt"} | ({TIED: json.dumps(tied)} if tied else {})
    path.touch()
    mode = path.stat().st_mode
    library = extra("save_model", "safetensors")
    try:
        extra("save_model", "safetensors.torch").save_file(held, path, metadata=metadata)
    except library.SafetensorError as error:
        raise CheckpointWriteError(f"save_model: {path} could not be written: {error}") from error
    path.chmod(mode)  # safetensors makes files that only their owner can read
    sync(path)


def _publish(
    folder: Path,
    shards: Sequence[Sequence[str]],
    beside: Sequence[str],
    names: Sequence[str],
    num_bytes: int,
) -> None:
    """Give the shards their names, so that an index never stands over shards of another set."""
    if (folder / INDEX).exists() and any((folder / name).exists() for name in names):
        _put_index(folder, shards, beside, num_bytes)
        for new, name in zip(beside, names, strict=True):
            _put_copy(folder / new, folder / name)
    else:
        for new, name in zip(beside, names, strict=True):
            os.replace(folder / new, folder / name)
    sync(folder)
    _put_index(folder, shards, names, num_bytes)


def _put_copy(new: Path, path: Path) -> None:
    """Put a file at a path too, at once: by a link, or by a copy where there are no links."""
    spare = path.with_name(_beside(path.name, secrets.token_hex(4)))
    try:
        os.link(new, spare)
    except OSError:
        shutil.copy(new, spare)
        sync(spare)
    os.replace(spare, path)


def _put_index(
    folder: Path, shards: Sequence[Sequence[str]], names: Sequence[str], num_bytes: int
) -> None:
    files = {key: name for keys, name in zip(shards, names, strict=True) for key in keys}
    spare = folder / _beside(INDEX, secrets.token_hex(4))
    content = {"metadata": {"total_size": num_bytes}, "weight_map": files}
    spare.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync(spare)
    os.replace(spare, folder / INDEX)
    sync(folder)


def _remove_others(folder: Path, kept: set[str]) -> None:
    """Remove what earlier sets left. A reader starts from the single file as long as it is there."""
    for path in list(folder.iterdir()):
        if _WRITTEN_HERE.fullmatch(path.name) and path.name not in kept:
            path.unlink()
    sync(folder)
