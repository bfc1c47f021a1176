"""Acknowledgements: ranks report to rank 0 what they have written, by files in the draft."""

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
from accel_fn.checkpoint.format.write import Written, write_error
from accel_fn.errors import CheckpointError

_TIMEOUT_S, _TIMEOUT_AFTER_LOSS_S = 600.0, 10.0
_POLL_S, _LONGEST_POLL_S = 0.002, 0.1


def acknowledge(draft: Path, rank: int, written: Written) -> None:
    """Report that this rank has written its share."""
    _put(draft, rank, asdict(written))


def report_failure(draft: Path, rank: int, error: Exception) -> None:
    """Report that this rank failed; remove its files first, since the disk may be full."""
    for path in draft.glob(file_of("*", rank, "*")):
        with suppress(OSError):
            path.unlink()
    with suppress(CheckpointError):
        _put(draft, rank, {"failure": str(error) or repr(error)})


def wait_for_ranks(draft: Path, ranks: Sequence[int], watchdog: Watchdog | None) -> list[Written]:
    """Return what these ranks have written, once all have.

    Raises if one of them failed, or if nothing was written for ten minutes: for ten seconds,
    once a collective of this rank has found that one is gone.
    """
    found: dict[int, Written] = {}
    size, poll_s, since = -1, _POLL_S, 0.0
    while True:
        for rank in ranks:
            path = _path(draft, rank)
            if rank not in found and path.exists():
                found[rank] = _take(path, rank)
        missing = [rank for rank in ranks if rank not in found]
        if not missing:
            return [found[rank] for rank in ranks]
        before, size = size, _size_of(draft)
        if size != before:
            since = time.monotonic()
        has_lost_rank = watchdog is not None and watchdog.has_lost_rank
        timeout_s = _TIMEOUT_AFTER_LOSS_S if has_lost_rank else _TIMEOUT_S
        if time.monotonic() > since + timeout_s:
            raise CheckpointError(
                f"save: every rank must write its share, got nothing of {missing} for {timeout_s:g} s"
            )
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)


def _path(draft: Path, rank: int) -> Path:
    return draft / file_of("written", rank, "json")


def _put(draft: Path, rank: int, content: Mapping[str, Any]) -> None:
    """Write a file that is whole when it has its name."""
    path = _path(draft, rank)
    half = path.with_suffix(".half")
    try:
        half.write_text(json.dumps(content))
        half.rename(path)
    except OSError as error:
        raise write_error(draft, error) from error


def _take(path: Path, rank: int) -> Written:
    """Read and remove a file: the checkpoint does not keep it."""
    content = json.loads(path.read_text())
    path.unlink()
    if "failure" in content:
        raise CheckpointError(f"rank {rank}: {content['failure']}")
    chunks = [(name, chunk_from(chunk)) for name, chunk in content["chunks"]]
    return Written(chunks, {name: FileMark(**mark) for name, mark in content["files"].items()})


def _size_of(draft: Path) -> int:
    """Sum the bytes written so far; the draft may have been removed."""
    size = 0
    try:
        for path in draft.iterdir():
            with suppress(FileNotFoundError):  # a file that has its name now
                size += path.stat().st_size
    except OSError as error:
        raise write_error(draft, error) from error
    return size
