"""export_model: weights alone out of a checkpoint, without the program that saved it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from accel_fn.checkpoint.format.manifest import read_manifest
from accel_fn.checkpoint.format.names import COMMON, COMMON_KEYS
from accel_fn.checkpoint.format.plain_data import dict_from_plain
from accel_fn.checkpoint.format.read import check_files, check_sizes, read_tensors
from accel_fn.checkpoint.run_state import prefix_of, with_prefix
from accel_fn.checkpoint.weights.entries import Entries, check_dense, check_storable
from accel_fn.checkpoint.weights.files import write_set
from accel_fn.errors import ArgumentError, CheckpointError, message
from accel_fn.observe.bar import bytes_bar


def export_model(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    step: str,
    max_shard_size: int,
) -> int:
    """Write the model of a step of a checkpoint as `save_model` would; return the number of tensors.

    Cost: reads the checkpoint to check it, then the model, which is held on the host.
    """
    path, prefix = Path(checkpoint), prefix_of("model", step)
    with _named_export():
        manifest = read_manifest(path)
        if step not in manifest.plans:
            names = ", ".join(name or "(no name)" for name in manifest.plans)
            raise CheckpointError(
                f"export: step must be one of {path}, got {step!r}; there are {names}"
            )
        check_sizes(path, manifest)
        with bytes_bar("check", sum(each.size for each in manifest.files.values())) as count:
            check_files(path, manifest, manifest.files, count)
    extra_state = dict_from_plain(path / COMMON, COMMON_KEYS, "export")["steps"][step]["model"]
    for name, value in extra_state.items():
        check_dense("export", name, value)
    tensors = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for name, entry in manifest.entries.items()
        if name.startswith(prefix)
    }
    total = sum(each.nbytes for each in tensors.values())
    with bytes_bar("read", total) as count:
        read_tensors(path, tensors, manifest.entries, count)
    entries = Entries(
        with_prefix(prefix, tensors),
        {
            name: first.removeprefix(prefix)
            for name, first in with_prefix(prefix, manifest.tied).items()
        },
        frozen={name: each.hash for name, each in with_prefix(prefix, manifest.frozen).items()},
    )
    with _named_export():
        check_storable(entries)
    try:
        write_set(Path(folder), entries, max_shard_size)
    except OSError as error:
        rule = "be one that can be written to"
        reason = error.strerror or str(error)
        raise ArgumentError(message("export", "folder", rule, str(folder), reason)) from error
    return len(tensors)


@contextmanager
def _named_export() -> Iterator[None]:
    """Name `export` in errors of what `load` reads and `save_model` checks."""
    try:
        yield
    except (ArgumentError, CheckpointError) as error:
        raise type(error)(f"export: {str(error).partition(': ')[2]}") from None
