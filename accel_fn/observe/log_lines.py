"""The lines of a run's log, and its events, as `log_to` writes them."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

EVENTS = ".events.jsonl"
SUFFIXES = (".csv", ".jsonl")
_LARGEST, _LONGEST_S = 2**63, 1e12

Line = dict[str, float]
T = TypeVar("T")


def log_lines(file: Path, most: int | None = None) -> Iterator[dict[str, float]]:
    """Read the lines of a log that `log_to` wrote: `step` and the other values, by name.

    Lines that were cut or damaged are left out, and values that are no numbers. A value that is not
    finite is nan.

    Args:
        file: a .jsonl or a .csv, which may be missing.
        most: look at so many lines at most; default: at all.

    Returns:
        An iterator over the lines.

    >>> from pathlib import Path
    >>> from accel_fn.extend import log_lines
    >>> [*log_lines(Path("runs/missing/log.jsonl"))]
    []
    """
    return (line for _, _, line in placed_lines(file, most))


def log_events(file: Path) -> list[dict[str, Any]]:
    """Return the events of the run of this log, such as starts, saves and loads.

    Each has `event`, the integer `step` and the number `time`, in seconds since 1970. They stand beside
    the log, in `NAME.events.jsonl`.

    >>> from pathlib import Path
    >>> from accel_fn.extend import log_events
    >>> log_events(Path("runs/missing/log.jsonl"))
    []
    """
    return [each for _, _, each in _placed(events_file(file), _object_of) if _is_event(each)]


def events_file(file: Path) -> Path:
    """The file with the events of the run, which a .csv and a .jsonl of one name share."""
    return file.with_name(file.stem + EVENTS)


def _is_event(found: dict[str, Any]) -> bool:
    return (
        isinstance(found.get("event"), str)
        and _is_step(found.get("step"))
        and _is_number(found.get("time"))
        and abs(found["time"]) < _LONGEST_S
    )


def placed_lines(file: Path, most: int | None = None) -> Iterator[tuple[int, int, Line]]:
    """Lines that have a step, of all or of the first ones: where each starts and ends, and its numbers."""
    parse = _row_parser() if file.suffix == ".csv" else _object_of
    for start, end, found in _placed(file, parse, most):
        if _is_step(found.get("step")):
            # JSON has null for a number that is not finite.
            values = {name: math.nan if each is None else each for name, each in found.items()}
            yield start, end, {name: value for name, value in values.items() if _is_number(value)}


def whole_lines(file: Path) -> tuple[bytes, bool]:
    """The lines of a log that can be read, and whether others stand between or behind them."""
    data = file.read_bytes()
    places = [(start, end) for start, end, _ in placed_lines(file)]
    if file.suffix == ".csv" and "step" in heading(file):
        places.insert(0, (0, data.index(b"\n") + 1))
    whole = b"".join(data[start:end] for start, end in places)
    # The last line may have been cut in its middle by the end of its process.
    return whole, whole != data[: data.rfind(b"\n") + 1]


def heading(file: Path) -> list[str]:
    """The names of the columns of a CSV; none if it has no whole line."""
    return next((parsed for _, _, parsed in _placed(file, _row_of)), [])


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_number(value: Any) -> bool:
    """Is it a float, or an integer that a float can be near to?"""
    return type(value) is float or (type(value) is int and abs(value) < _LARGEST)


def _placed(
    file: Path, parse: Callable[[str], T | None], most: int | None = None
) -> Iterator[tuple[int, int, T]]:
    """What the lines of a file hold, which may be missing, be cut or have damaged bytes."""
    end = 0
    with suppress(FileNotFoundError), file.open("rb") as opened:
        for data in itertools.islice(opened, most):
            start, end = end, end + len(data)
            found = parse(data.decode(errors="replace")) if data.endswith(b"\n") else None
            if found is not None:
                yield start, end, found


def _object_of(line: str) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(line), dict):
            return found
    return None


def _row_of(line: str) -> list[str] | None:
    with suppress(csv.Error):  # a cell of a damaged file that is too long
        return next(csv.reader([line]), None)
    return None


def _row_parser() -> Callable[[str], dict[str, Any] | None]:
    """What parses rows that have as many cells as the first one; empty cells are left out."""
    names: list[str] = []

    def parse(line: str) -> dict[str, Any] | None:
        row = _row_of(line) or []
        if not names:
            names.extend(row)
        elif len(row) == len(names):
            return {name: _number(cell) for name, cell in zip(names, row, strict=True) if cell}
        return None

    return parse


def _number(cell: str) -> float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(cell)
    return cell
