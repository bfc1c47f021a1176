"""Draft: a checkpoint that is being written, until all ranks have written and it gets its name."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from accel_fn.checkpoint.format.hashing import sync, write_file
from accel_fn.checkpoint.format.manifest import NAME, Manifest
from accel_fn.checkpoint.format.names import draft_of, name_of, rename_draft
from accel_fn.checkpoint.format.shard_plan import with_chunks
from accel_fn.checkpoint.format.write import Written, write_error
from accel_fn.checkpoint.retention import retain, tidy
from accel_fn.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is being written.

    `head` lacks what the ranks write: it has no files, and entries without chunks.
    """

    home: Path
    head: Manifest
    keep: int | None
    keep_every: int | None
    resumed_from: int | None

    @property
    def path(self) -> Path:
        """Where it is written."""
        return draft_of(self.home, self.head.step)

    @property
    def final(self) -> Path:
        """Where it will be."""
        return self.home / name_of(self.head.step)

    def commit(self, written: Sequence[Written]) -> None:
        """Give it its name, and remove older ones. On the main rank, once all ranks have written."""
        files = {name: mark for each in written for name, mark in each.files.items()}
        chunks = chain.from_iterable(each.chunks for each in written)
        manifest = replace(self.head, entries=with_chunks(self.head.entries, chunks), files=files)
        try:
            if not self.path.is_dir():
                raise CheckpointError(
                    f"save: folder must stay while it is written to, got {self.home}, in which "
                    f"{self.path.name} is gone: somebody has moved or removed it"
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
            rename_draft(self.path, self.final)
            tidy(self.home)
        except OSError as error:
            raise write_error(self.path, error) from error
        if self.keep is not None:
            retain(self.home, self.head.step, self.keep, self.keep_every, self.resumed_from)

    def discard(self) -> None:
        """Remove what was written of it."""
        shutil.rmtree(self.path, ignore_errors=True)
