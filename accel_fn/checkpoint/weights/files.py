"""Weights as files: how tensors are split into shards, and how a set of files replaces another.

huggingface_hub 2.4 is not used: its `save_torch_state_dict` removes the old files before it writes the new,
its `load_torch_model` overwrites the model before all shards are checked, and its split counts whole storages
in place of views: it would replace 12 lines here, by nine packages.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from accel_fn.checkpoint.format.hashing import sync
from accel_fn.checkpoint.format.names import rename
from accel_fn.checkpoint.weights.entries import Entries
from accel_fn.errors import CheckpointWriteError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TIED = "accel_fn.tied"
"""The key of a file's metadata that lists the other names of its tensors."""
FROZEN = "accel_fn.frozen"
"""The key of a file's metadata that lists parameters which the set leaves out, with a hash of each."""

_WRITTEN_HERE = re.compile(
    r"model(\.new-[0-9a-f]{8})?\.safetensors"
    r"|model-\d{5,}-of-\d{5,}(\.new-[0-9a-f]{8})?\.safetensors"
    r"|model\.safetensors\.index(\.new-[0-9a-f]{8})?\.json"
)


def write_set(folder: Path, entries: Entries, limit: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shards = _split(entries, limit)
    count = len(shards)
    names = [f"model-{at:05d}-of-{count:05d}.safetensors" for at in range(1, count + 1)]
    if count == 1:
        names = [SINGLE]
    token = secrets.token_hex(4)
    spares = [_spare(name, token) for name in names]
    try:
        for spare, keys in zip(spares, shards, strict=True):
            _write_shard(folder / spare, keys, entries)
    except BaseException:
        for spare in spares:
            (folder / spare).unlink(missing_ok=True)
        raise
    sync(folder)
    if count == 1:
        rename(folder / spares[0], folder / SINGLE)
        sync(folder)
        _remove_others(folder, {SINGLE})
    else:
        _commit(folder, entries, shards, spares, names)
        _remove_others(folder, {INDEX, *names})


def _split(entries: Entries, limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for key in entries.tensors:
        num_bytes = entries.num_bytes(key)
        if shards[-1] and size + num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += num_bytes
    return shards


def _spare(name: str, token: str) -> str:
    stem, _, kind = name.rpartition(".")
    return f"{stem}.new-{token}.{kind}"


def _write_shard(path: Path, keys: Sequence[str], entries: Entries) -> None:
    held = {
        key: entries.tensors[key]
        .as_subclass(Tensor)
        .resolve_conj()
        .resolve_neg()
        .to(entries.written_dtype(key))
        .contiguous()
        for key in keys
    }
    tied = {name: first for name, first in entries.tied.items() if first in held}
    listed = {TIED: tied, FROZEN: entries.frozen}
    metadata = {"format": "pt"} | {key: json.dumps(each) for key, each in listed.items() if each}
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(held, path, metadata=metadata)
    except SafetensorError as error:
        raise CheckpointWriteError(f"save_model: {path} could not be written: {error}") from error
    with suppress(OSError):  # a file system without modes
        path.chmod(mode)  # safetensors makes files that only their owner can read
    sync(path)


def _commit(
    folder: Path,
    entries: Entries,
    shards: Sequence[Sequence[str]],
    spares: Sequence[str],
    names: Sequence[str],
) -> None:
    """Give the shards their names, so that an index never stands over shards of another set."""

    def put_index(files: Sequence[str]) -> None:
        spare = folder / _spare(INDEX, secrets.token_hex(4))
        content = {
            "metadata": {"total_size": sum(map(entries.num_bytes, entries.tensors))},
            "weight_map": {
                key: name for keys, name in zip(shards, files, strict=True) for key in keys
            },
        }
        spare.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        sync(spare)
        rename(spare, folder / INDEX)
        sync(folder)

    place: Callable[[Path, Path], None] = rename
    if (folder / INDEX).exists() and any((folder / name).exists() for name in names):
        put_index(spares)
        place = _put_copy
    for spare, name in zip(spares, names, strict=True):
        place(folder / spare, folder / name)
    sync(folder)
    put_index(names)


def _put_copy(new: Path, path: Path) -> None:
    """Put a file at a path too, at once: by a link, or by a copy where there are no links."""
    spare = path.with_name(_spare(path.name, secrets.token_hex(4)))
    try:
        os.link(new, spare)
    except OSError:
        shutil.copy(new, spare)
        sync(spare)
    rename(spare, path)


def _remove_others(folder: Path, kept: set[str]) -> None:
    """Remove what earlier sets left. A reader starts from the single file as long as it is there."""
    for path in list(folder.iterdir()):
        if _WRITTEN_HERE.fullmatch(path.name) and path.name not in kept:
            path.unlink()
    sync(folder)
