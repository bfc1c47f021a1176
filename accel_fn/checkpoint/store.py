"""The folder of a run's checkpoints: list them, commit a new one, remove older ones."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from accel_fn.checkpoint.files import sync, write_file
from accel_fn.checkpoint.manifest import NAME, Manifest, read_manifest
from accel_fn.checkpoint.names import (
    file_of,
    hide,
    name_of,
    reading,
    recover,
    rename_finished,
    steps_in,
    unfinished_folder,
)
from accel_fn.checkpoint.tensors import Written, check_sizes, write_error
from accel_fn.errors import CheckpointError, check_folder

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in a folder.

    Attributes:
        path: the checkpoint's own folder.
        step: batches consumed before it was saved.
        saved_at: the time at which it was written.
        size: bytes; 0 if it cannot be read.
        world_size: ranks that saved it; 0 if it cannot be read.
        damage: the reason why it is not complete; empty if all files have the right sizes.
        score: the `score` that was passed to `save`; None without one, or if it cannot be read.
        mesh: the number of ranks along each axis; without a mesh, all were along "dp"; empty if it
            cannot be read.
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
        folder: the folder in which `save` writes; it need not exist.

    Returns:
        One entry for each checkpoint. Contents are not read: `load` does that.

    Raises:
        RuntimeError: the folder may not be read.
        TypeError: `folder` is not a path.

    Cost: reads each manifest, and the sizes of files.

    >>> import accel_fn as af
    >>> af.checkpoint.list_checkpoints("no such folder")
    []
    """
    path = check_folder("list_checkpoints", folder)
    with reading(path, "list_checkpoints"):
        found = [look(path / name_of(step), step) for step in steps_in(path)]
    return [each for each in found if each is not None]


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Find the newest complete checkpoint of a folder.

    Args:
        folder: the folder in which `save` writes; it need not exist.

    Returns:
        The checkpoint's folder; None if there is none. Newer ones that are not complete are logged.

    Raises:
        RuntimeError: the folder may not be read.
        TypeError: `folder` is not a path.

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
    """Describe a checkpoint by its manifest; None if the run that saves here has removed it."""
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
        # Raise PermissionError if the user may list the parent folder, but not open what is in it.
        path.stat()
    return None


class Run:
    """The step from which a run was resumed, and the steps that it has saved since."""

    def __init__(self, resumed_from: int | None = None) -> None:
        self.resumed_from = resumed_from
        self.saved: set[int] = set()
        self.manifests: dict[Path, Manifest] = {}
        """The manifests that this run wrote, without entries, so that `keep` need not read them."""

    def age(self, step: int) -> tuple[bool, bool, int]:
        """Return a key that sorts checkpoints by age, oldest first.

        First come steps after the one from which this run resumed: an earlier run has left them.
        Then come the steps up to that one, then those that this run saved. File times cannot be
        used: clocks differ between machines, and a copied file has a new time.
        """
        is_continued = self.resumed_from is not None and step <= self.resumed_from
        return step in self.saved, is_continued, step


@dataclass(frozen=True, slots=True)
class NewCheckpoint:
    """A checkpoint that is being written."""

    home: Path
    head: Manifest
    """The manifest before the ranks have written: it lists no files, and its entries have no
    chunks."""
    keep: int | None
    keep_every: int | None
    keep_best: int
    run: Run

    @property
    def function(self) -> str:
        return "save"

    @property
    def path(self) -> Path:
        """Return the folder in which the checkpoint is written."""
        return unfinished_folder(self.home, self.head.step)

    @property
    def final(self) -> Path:
        """Return the folder of the finished checkpoint."""
        return self.home / name_of(self.head.step)

    def acknowledgement(self, rank: int) -> Path:
        """Return the path of the file by which a rank reports what it has written."""
        return self.path / file_of("written", rank, "json")

    def files_of(self, rank: int) -> Iterable[Path]:
        return self.path.glob(file_of("*", rank, "*"))

    def commit(self, written: Sequence[Written]) -> None:
        """Rename the checkpoint to its final name, and remove older ones.

        Rank 0 calls this after all ranks have written.
        """
        files = {name: mark for each in written for name, mark in each.files.items()}
        entries = {}
        for name, entry in self.head.entries.items():
            chunks = tuple(chunk for each in written for chunk in each.chunks.get(name, ()))
            entries[name] = replace(entry, chunks=chunks)
        manifest = replace(self.head, entries=entries, files=files)
        try:
            if not self.path.is_dir():
                raise CheckpointError(
                    f"save: folder must stay while it is written to, got {self.home}, in which "
                    f"{self.path.name} is gone: it was moved or removed"
                )
            for name, mark in files.items():
                path = self.path / name
                if not path.exists() or path.stat().st_size != mark.size:
                    raise CheckpointError(
                        "save: folder must be on a file system that all ranks share, got "
                        f"{self.home}, in which rank 0 does not find {name}"
                    )
            write_file(self.path / NAME, [manifest.to_bytes()])
            sync(self.path)
            rename_finished(self.path, self.final)
            self.run.saved.add(self.head.step)
            self.run.manifests[self.final] = replace(manifest, entries={})
            tidy(self.home)
        except OSError as error:
            raise write_error(self.path, error) from error
        try:
            if self.keep is not None:
                self._retain(self.keep)
        except OSError as error:
            raise CheckpointError(
                f"save: {self.final} is saved, but older ones must be removed: {error}"
            ) from error

    def _retain(self, keep: int) -> None:
        """Remove all whole checkpoints except the newest `keep`.

        The `keep_best` checkpoints of highest score, multiples of `keep_every`, damaged
        checkpoints, and the checkpoint from which this run was resumed stay.
        """
        paths = {step: self.home / name_of(step) for step in steps_in(self.home)}
        found = [look(path, step, self.run.manifests.get(path)) for step, path in paths.items()]
        whole = [each for each in found if each is not None and not each.damage]
        whole.sort(key=lambda each: self.run.age(each.step))
        scored = [(each.score, each.step) for each in whole if each.score is not None]
        scored = sorted((pair for pair in scored if not math.isnan(pair[0])), reverse=True)
        # Among checkpoints with equal scores, the newer one counts as better.
        best = {step for _, step in scored[: self.keep_best]}
        for each in whole[:-keep]:
            stays = each.step == self.run.resumed_from or each.step in best
            if not stays and not (self.keep_every and each.step % self.keep_every == 0):
                shutil.rmtree(hide(each.path), ignore_errors=True)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Remove unfinished checkpoints of killed runs; rename back those that the runs renamed."""
    for path in recover(folder):
        shutil.rmtree(path, ignore_errors=True)
