"""Listing the checkpoints of a folder."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from accel_fn.checkpoint.listing import Checkpoint, list_checkpoints
from accel_fn.cli.output import Cell, errors_in_a_line, print_json, print_table

_UNITS = ("B", "kB", "MB", "GB", "TB")


def list_folder(folder: Path, *, as_json: bool) -> None:
    """A table, or JSON with bytes and times; exits with 1 where one is not whole."""
    with errors_in_a_line():
        found = list_checkpoints(folder)
    if as_json:
        print_json([_as_dict(each) for each in found])
    elif found:
        now = datetime.now(UTC)
        rows: list[list[str | Cell]] = [_row(each, now) for each in found]
        print_table(["step", "age", "size", "ranks", "whole"], rows)
    else:
        print(f"no checkpoint in {folder}")
    sys.exit(any(each.damage for each in found))


def _as_dict(found: Checkpoint) -> dict[str, object]:
    return {
        "path": str(found.path),
        "step": found.step,
        "saved_at": found.saved_at.isoformat(),
        "size": found.size,
        "world_size": found.world_size,
        "whole": not found.damage,
        "damage": found.damage,
    }


def _row(found: Checkpoint, now: datetime) -> list[str | Cell]:
    whole: Cell = (found.damage, "red") if found.damage else ("yes", "green")
    size = _size(found.size) if found.size else "-"
    ranks = str(found.world_size) if found.world_size else "-"
    return [str(found.step), _age(now - found.saved_at), size, ranks, whole]


def _age(age: timedelta) -> str:
    """`3 days`, `2 h`, `5 min`, `12 s`."""
    seconds = max(int(age.total_seconds()), 0)
    for length, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _size(size: float) -> str:
    for unit in _UNITS[:-1]:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {_UNITS[-1]}"
