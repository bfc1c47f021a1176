"""Read the log of a run: its values as columns, and its events."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from accel_fn.base.printable import printable
from accel_fn.errors import ArgumentError

EVENTS = ".events.jsonl"
SUFFIXES = (".csv", ".jsonl")
_LARGEST, _LONGEST_S = 2**63, 1e12
_FEW = 10  # lines of a file that show whether it is a log: data sets end in .jsonl, too

Line = dict[str, float]
T = TypeVar("T")


class Column(NamedTuple):
    """The values of one name, and the steps at which they were logged, which rise."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class Run:
    """The content of one log."""

    name: str
    """The path of the run's folder, or of the log where its folder has several."""

    columns: dict[str, Column]
    """By name, in the order of the log; `time` is one of them."""

    events: list[dict[str, Any]]
    """In the order of the log; each has a number `time` and an integer `step`."""

    @property
    def last_step(self) -> int:
        """The last step that has values, or that of the newest event; 0 without any."""
        lasts = [column.steps[-1] for column in self.columns.values()]
        return max(lasts + [event["step"] for event in self.events[-1:]], default=0)

    def of_plans(self, name: str) -> list[Column]:
        """The columns of this name, one a plan: each plan that shares a log has a prefix."""
        names = [each for each in self.columns if each == name or each.endswith(f"/{name}")]
        return [self.columns[each] for each in names]


def read_runs(function: str, paths: Sequence[Path]) -> tuple[list[Run], list[Path]]:
    """Read every log in these folders or files; return the runs, and the folders without a log."""
    try:
        found = {path: find_logs(path) for path in paths}
        runs = [
            read_run(log, str(path if len(logs) == 1 else log))
            for path, logs in found.items()
            for log in logs
        ]
    except OSError as error:
        at = error.filename or ", ".join(map(str, paths))
        raise ArgumentError(f"{function}: {at} cannot be read: {error.strerror}") from None
    if not runs:
        raise ArgumentError(f"{function}: no log in {', '.join(map(str, paths))}; {_repair(paths)}")
    # runs/* also gives files that lie beside the runs.
    return runs, [path for path, logs in found.items() if not logs and path.is_dir()]


def _repair(paths: Sequence[Path]) -> str:
    for path in paths:
        if path.is_dir() and any(each.is_dir() and find_logs(each) for each in path.iterdir()):
            return f"its folders have one: use {path}/*"
    return 'a log is *.jsonl or *.csv with a column step, as af.log_to("runs/a/log.jsonl") writes'


def find_logs(path: Path) -> list[Path]:
    """The logs in a folder, by name; of a file, that file if it is a log."""
    if not path.is_dir():
        files = [path]
    else:
        files = sorted(
            each for each in path.iterdir() if each.suffix in SUFFIXES and each.is_file()
        )
    logs = [each for each in files if not each.name.endswith(EVENTS) and _is_log(each)]
    # A .csv and a .jsonl of one name are of one run; the second one counts.
    return [*{events_file(each): each for each in logs}.values()]


def _is_log(file: Path) -> bool:
    """Do its first lines have a step and a value, or does a file with its events stand beside it?"""
    return events_file(file).exists() or any(
        len(line) > 1 for _, _, line in placed_lines(file, _FEW)
    )


def events_file(file: Path) -> Path:
    """The file with the events of the run, which a .csv and a .jsonl of one name share."""
    return file.with_name(file.stem + EVENTS)


def read_run(file: Path, name: str) -> Run:
    """Read one log and its events. Lines that were cut in their middle are left out."""
    # A value that was logged late may stand behind later steps.
    by_step: dict[int, Line] = {}
    for _, _, line in placed_lines(file):
        by_step.setdefault(int(line.pop("step")), {}).update(line)
    columns: dict[str, Column] = {}
    for step in sorted(by_step):
        for key, value in by_step[step].items():
            column = columns.setdefault(key, Column([], []))
            column.steps.append(step)
            column.values.append(value)
    events = [each for _, _, each in _placed(events_file(file), _object_of) if _is_event(each)]
    return Run(printable(name), {printable(each): columns[each] for each in columns}, events)


def _is_event(found: dict[str, Any]) -> bool:
    return (
        isinstance(found.get("event"), str)
        and _is_step(found.get("step"))
        and is_time(found.get("time"))
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


def is_time(value: Any) -> bool:
    """Is this a number of seconds, of a clock or of a stretch of time?"""
    return _is_number(value) and abs(value) < _LONGEST_S


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
