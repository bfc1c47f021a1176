"""list_checkpoints and latest: which checkpoints a folder holds."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from accel_fn.checkpoint.format.manifest import NAME, Manifest, read_manifest
from accel_fn.checkpoint.format.names import name_of, reading, steps_in
from accel_fn.checkpoint.format.read import check_sizes
from accel_fn.errors import CheckpointError, check_folder

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One of a folder's checkpoints.

    Attributes:
        path: its folder.
        step: batches consumed before it.
        saved_at: when it was written.
        size: bytes; 0 if it cannot be read.
        world_size: ranks that saved it; 0 if it cannot be read.
        damage: why it is not complete; empty if all files have the right sizes.
        score: what `save` was given; None if nothing, or if it cannot be read.
        mesh: the number of ranks along each axis; without a mesh, all were along "dp"; empty if it cannot
            be read.
    """

    path: Path
    step: int
    saved_at: datetime
    size: int = 0
    world_size: int = 0
    damage: str = ""
    score: float | None = None
    mesh: Mapping[str, int] = field(default_factory=dict, hash=False)


def list_checkpoints(folder: str | os.PathLike[str]) -> list[Checkpoint]:
    """List the checkpoints of a folder, oldest first, without any that is being written.

    Args:
        folder: where `save` writes; need not be there.

    Returns:
        One entry each. Contents are not read: `load` does that.

    Raises:
        RuntimeError: the folder may not be read.
        TypeError: `folder` is no path.

    Cost: reads each manifest, and the sizes of files.

    >>> import accel_fn as af
    >>> af.list_checkpoints("no such folder")
    []
    """
    path = check_folder("list_checkpoints", folder)
    with reading(path, "list_checkpoints"):
        found = [look(path / name_of(step), step) for step in steps_in(path)]
    return [each for each in found if each is not None]


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Find the newest complete checkpoint of a folder.

    Args:
        folder: where `save` writes; need not be there.

    Returns:
        Its folder; None if there is none. Newer ones that are not complete are logged.

    Raises:
        RuntimeError: the folder may not be read.
        TypeError: `folder` is no path.

    Cost: reads a manifest, and the sizes of files.

    >>> import accel_fn as af
    >>> af.latest("no such folder") is None
    True
    """
    path = check_folder("latest", folder)
    with reading(path, "latest"):
        for step in reversed(steps_in(path)):
            found = look(path / name_of(step), step)
            if found is not None and not found.damage:
                return found.path
            if found is not None:
                _LOG.warning("latest: %s is skipped: %s", found.path, found.damage)
    return None


def look(path: Path, step: int, manifest: Manifest | None = None) -> Checkpoint | None:
    """Describe a checkpoint, by its manifest; None if the run that saves here has removed it."""
    damage, size, world_size, score, mesh = "", 0, 0, None, {}
    try:
        manifest = manifest or read_manifest(path)
        check_sizes(path, manifest)
        size, world_size, score = manifest.size, manifest.world_size, manifest.score
        mesh = dict(manifest.mesh)
    except CheckpointError as error:
        damage = str(error).removeprefix("load: ")
    for each in (path / NAME, path):
        with suppress(OSError):
            saved_at = datetime.fromtimestamp(each.stat().st_mtime, UTC)
            return Checkpoint(path, step, saved_at, size, world_size, damage, score, mesh)
    with suppress(FileNotFoundError):
        path.stat()  # raises where the folder can be listed and not searched
    return None
