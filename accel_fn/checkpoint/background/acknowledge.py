"""How ranks tell rank 0 what they have written, without a collective: by files in the draft."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accel_fn.base.state import Watchdog
from accel_fn.checkpoint.format.hashing import FileMark
from accel_fn.checkpoint.format.manifest import chunk_from
from accel_fn.checkpoint.format.names import file_of
from accel_fn.checkpoint.format.write import Written, cannot_write
from accel_fn.errors import CheckpointError

_PATIENCE_S, _PATIENCE_WITH_THE_DEAD_S = 600.0, 10.0
_GLANCE_S, _LONGEST_GLANCE_S = 0.002, 0.1


def tell_written(draft: Path, rank: int, written: Written) -> None:
    """This rank has written its share."""
    _tell(draft, rank, asdict(written))


def tell_failure(draft: Path, rank: int, error: Exception) -> None:
    """This rank could not. What it has written goes: a note may need the room."""
    for path in draft.glob(file_of("*", rank, "*")):
        with suppress(OSError):
            path.unlink()
    with suppress(CheckpointError):
        _tell(draft, rank, {"failure": str(error) or repr(error)})


def hear(draft: Path, ranks: Sequence[int], watch: Watchdog | None) -> list[Written]:
    """What these ranks have written, when all have.

    Raises where one of them failed, or where nothing was written for ten minutes: for ten seconds,
    once this rank has met one in a collective that is gone.
    """
    found: dict[int, Written] = {}
    seen, glance, since = -1, _GLANCE_S, 0.0
    while True:
        for rank in ranks:
            path = _note(draft, rank)
            if rank not in found and path.exists():
                found[rank] = _read(path, rank)
        missing = [rank for rank in ranks if rank not in found]
        if not missing:
            return [found[rank] for rank in ranks]
        size = _size_of(draft)
        if size != seen:
            seen, since = size, time.monotonic()
        is_short = watch is not None and watch.has_lost_rank
        patience_s = _PATIENCE_WITH_THE_DEAD_S if is_short else _PATIENCE_S
        if time.monotonic() > since + patience_s:
            raise CheckpointError(
                f"save: every rank must write its share, got nothing of {missing} for {patience_s:g} s"
            )
        time.sleep(glance)
        glance = min(2 * glance, _LONGEST_GLANCE_S)


def _tell(draft: Path, rank: int, told: Mapping[str, Any]) -> None:
    """Leave a note, which is whole when it has its name."""
    path = _note(draft, rank)
    half = path.with_suffix(".half")
    try:
        half.write_text(json.dumps(told))
        half.rename(path)
    except OSError as error:
        raise cannot_write(draft, error) from error


def _read(path: Path, rank: int) -> Written:
    """What a note says; the checkpoint does not keep it."""
    told = json.loads(path.read_text())
    path.unlink()
    if "failure" in told:
        raise CheckpointError(f"rank {rank}: {told['failure']}")
    chunks = [(name, chunk_from(chunk)) for name, chunk in told["chunks"]]
    return Written(chunks, {name: FileMark(**mark) for name, mark in told["files"].items()})


def _note(draft: Path, rank: int) -> Path:
    return draft / file_of("written", rank, "json")


def _size_of(draft: Path) -> int:
    """Bytes written so far. It may have been removed."""
    size = 0
    try:
        for path in draft.iterdir():
            with suppress(FileNotFoundError):  # a note that has its name now
                size += path.stat().st_size
    except OSError as error:
        raise cannot_write(draft, error) from error
    return size
