"""Read the log of a run: its values as columns, and its events."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from accel_fn.errors import ArgumentError
from accel_fn.extend import log_events, log_lines

_EVENTS = ".events.jsonl"
_SUFFIXES = (".csv", ".jsonl")
_LONGEST_S = 1e12
# Read this many lines to find out whether a file is a log: data sets end in .jsonl too.
_FEW = 10
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, line ends, and surrogates, which UTF-8 cannot encode."""


class Column(NamedTuple):
    """The values of one name, and the steps at which they were logged, in rising order."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class Run:
    """The content of one log."""

    name: str
    """The path that the user gave, or the path of this log if that is a folder of several logs."""

    columns: dict[str, Column]
    """Columns by name, in the order of the log; `time` is one of them."""

    events: list[dict[str, Any]]
    """Events in the order of the log; each has a number `time` and an integer `step`."""

    @property
    def last_step(self) -> int:
        """Return the last step with values, or the newest event's step if it is later; 0 without both."""
        lasts = [column.steps[-1] for column in self.columns.values()]
        return max(lasts + [event["step"] for event in self.events[-1:]], default=0)

    def of_plans(self, name: str) -> list[Column]:
        """Return the columns of this name, one per plan. Several plans in one log have prefixes."""
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
    # Leave out files without a log: a pattern such as runs/* also matches files next to the runs.
    return runs, [path for path, logs in found.items() if not logs and path.is_dir()]


def _repair(paths: Sequence[Path]) -> str:
    for path in paths:
        if path.is_dir() and any(each.is_dir() and find_logs(each) for each in path.iterdir()):
            return f"its folders have one: use {path}/*"
    return 'a log is *.jsonl or *.csv with a column step, as af.log_to("runs/a/log.jsonl") writes'


def find_logs(path: Path) -> list[Path]:
    """Return the logs in a folder, sorted by name; for a file, return that file if it is a log."""
    if not path.is_dir():
        files = [path]
    else:
        files = sorted(
            each for each in path.iterdir() if each.suffix in _SUFFIXES and each.is_file()
        )
    logs = [each for each in files if not each.name.endswith(_EVENTS) and _is_log(each)]
    # A .csv and a .jsonl of one name belong to one run; keep the .jsonl, which comes second.
    return [*{each.with_suffix(""): each for each in logs}.values()]


def _is_log(file: Path) -> bool:
    """Return whether a file begins with lines of steps and values, or has a file of events."""
    has_events = file.with_name(file.stem + _EVENTS).exists()
    return has_events or any(len(line) > 1 for line in log_lines(file, _FEW))


def read_run(file: Path, name: str) -> Run:
    """Read one log and its events; skip incomplete lines."""
    # Sort by step, since a value that was logged late may come after values of later steps.
    by_step: dict[int, dict[str, float]] = {}
    for line in log_lines(file):
        by_step.setdefault(int(line.pop("step")), {}).update(line)
    columns: dict[str, Column] = {}
    for step in sorted(by_step):
        for key, value in by_step[step].items():
            column = columns.setdefault(key, Column([], []))
            column.steps.append(step)
            column.values.append(value)
    columns = {_printable(each): column for each, column in columns.items()}
    return Run(_printable(name), columns, log_events(file))


def is_time(value: Any) -> bool:
    """Return whether a value is a number that can be a time or a duration in seconds."""
    return type(value) in (int, float) and abs(value) < _LONGEST_S


def _printable(text: str) -> str:
    """Escape characters that change a terminal's state or cannot be printed."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
