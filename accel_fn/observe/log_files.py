"""Files of a run's log: values by step, as JSON lines or CSV, and beside them the events of the run."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakSet, WeakValueDictionary, finalize

from accel_fn.core.warn import warn_user
from accel_fn.errors import LogError
from accel_fn.observe.log_lines import Line, events_file, heading, placed_lines, whole_lines
from accel_fn.parallel.file_lock import FileLock

_LOG = logging.getLogger(__name__)


def open_log(path: Path) -> LogFile:
    """Open the log of a run; plans of one process share it."""
    path = Path(os.path.abspath(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path = path.parent.resolve() / path.name
        log = _LOGS.get(path) or _new_log(path)
    except OSError as error:
        raise LogError(
            f"log_to: writers must be files that can be written, got {path}: {error.strerror}"
        ) from error
    _LOGS[path] = log
    return log


def _new_log(path: Path) -> LogFile:
    """Open a log that no plan of this process has opened, unless the file is no log."""
    begin = _TABLES[path.suffix].begin
    with path.open("a+b") as file:
        file.seek(0)
        found = file.read(len(begin))
    # A log that was cut may be shorter than this. In another file, lines would be lost.
    is_log = begin.startswith(found) or found.startswith(b"\0") or events_file(path).exists()
    if not is_log:
        raise LogError(
            f"log_to: writers must be new files or logs, got {path}, which holds something else; give "
            "the log a name of its own"
        )
    return LogFile(path)


class LogFile:
    """A table of values and the events of its run, which goes on if they cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._events = _events_beside(path)
        self._table = _TABLES[path.suffix](path)
        self._has_begun = False
        self._has_warned = False
        self._has_warned_of_two = False
        self.recorders: WeakSet[Any] = WeakSet()
        """The recorders that write to this log, one for each plan."""

    def add_plan(self, plan: str) -> None:
        """Add the text of a plan whose values this log will have."""
        self._events.plans.append(plan)

    def note_process(self, step: int, process: Mapping[str, object]) -> None:
        """Note, once, that a process begins to log."""
        self._try(lambda: self._events.start(step, process))

    def begin_run(self, step: int) -> None:
        """Cut the log back to where a run begins that loaded nothing; of what it loses it keeps a copy."""
        # Another plan of the run may have logged the batch that this one begins with.
        newest = step + 1 if self._has_begun else step
        if self._last_step > newest:
            old = self._path.with_name(f"{self._path.name}.old")
            _LOG.warning(
                "%s has steps up to %d, and this run begins after step %d; the log of before is now %s",
                *(self._path, self._last_step, step, old.name),
            )
            self._try(lambda: shutil.copyfile(self._path, old))
            self.resume(step, 0.0, None)
        self._has_begun = True

    def resume(self, step: int, seconds: float, folder: Path | None) -> None:
        """Cut the log back to the step at which a run resumes."""
        self._has_begun = True
        last = self._table.last
        self._try(lambda: self._table.cut(step))
        lost = {f"lost_{name}": last.get(name) for name in ("step", "time")}
        self.event("load", step, seconds=seconds, folder=folder and str(folder), **lost)

    def rewind(self, step: int) -> None:
        """Remove the line of a step that is run again, and later ones, unless another plan has."""
        if self._last_step > step:
            self._try(lambda: self._table.cut(step - 1))

    def event(self, event: str, step: int, **facts: object) -> None:
        """Add an event, unless another plan of the process has just added it."""
        self._try(lambda: self._events.add({"event": event, "step": step, **facts}))
        # An event is rare, a line is not: to look for the file at each line would slow a step.
        if not self._has_warned and not self._table.is_in_place():
            self._has_warned = True
            warn_user(
                f"log_to: {self._path} should stay in its place while a run logs to it, it was removed, "
                f"renamed or replaced up to step {step}; lines of the run are not in it"
            )

    def values(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Add values of the newest step."""
        last_step = self._last_step
        if step < last_step:
            warn_user(
                f"log_values: state should be of the newest step in {self._path}, got step {step} after step "
                f"{last_step}; the values are not written"
            )
            return
        if step == last_step and not self._has_warned_of_two:
            self._warn_of_two(step, values)
        self._try(lambda: self._table.put({"step": step, "time": at, **values}))

    def _warn_of_two(self, step: int, values: Mapping[str, float]) -> None:
        """Warn if the line of this step has another value of one of these names."""
        last = self._table.last
        twice = [name for name, value in values.items() if str(last.get(name, value)) != str(value)]
        if twice:
            self._has_warned_of_two = True
            warn_user(
                f"log_to: each name should have one value a step in {self._path}, got two of {twice[0]!r} at "
                f"step {step}; the newest is kept. Give the plans that share a log, or the calls of "
                "log_values, a prefix each"
            )

    @property
    def _last_step(self) -> int:
        return int(self._table.last.get("step", -1))

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warn_user(
                    f"log_to: {self._path} should be written, got {error.strerror}; the run goes on, and "
                    "lines that cannot be written are lost"
                )


class _JsonLines:
    """A file with a JSON object for each step, steps rising; the last one grows while its step is newest."""

    begin = b'{"step": '

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            _set_damage_aside(path)
        self._open()

    def put(self, line: Line) -> None:
        """Add a line, or add values to the last one if it is of the same step."""
        is_same = line["step"] == self.last.get("step")
        end = os.fstat(self._file).st_size
        # Another program may have cut the file, as logrotate does: the last line is not there any more.
        start = self._start if is_same and end == self._end else end
        self._put_at(start, {**self.last, **line} if is_same else line)

    def is_in_place(self) -> bool:
        """Whether the file that is written is the one that the path leads to."""
        with suppress(OSError):
            return os.path.samestat(self._path.stat(), os.fstat(self._file))
        return False

    def cut(self, step: float) -> None:
        """Remove the lines of later steps."""
        self._start, self._end = 0, 0
        self.last: Line = {}
        for start, end, line in placed_lines(self._path):
            if line["step"] > step:
                break
            self._start, self._end, self.last = start, end, line
        os.ftruncate(self._file, self._end)

    def _open(self) -> None:
        """Open the file and drop a last line that was cut in its middle."""
        # Appended to: a file that is cut meanwhile would get a hole of zeros.
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._close = finalize(self, os.close, self._file)
        self.cut(math.inf)

    def _put_at(self, start: int, line: Line) -> None:
        data = self._encoded(line, is_first=start == 0)
        os.ftruncate(self._file, start)
        self.last, self._start, self._end = line, start, start + len(data)
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:  # a full disk: half a line would spoil the next one
            os.ftruncate(self._file, start)
            raise

    def _encoded(self, line: Line, *, is_first: bool) -> bytes:
        # JSON has no nan and no infinity, which only Python's readers take. Numbers need no encoder,
        # which takes twice as long.
        pairs = [
            f"{_quoted(name)}: {each if math.isfinite(each) else 'null'}"
            for name, each in line.items()
        ]
        return f"{{{', '.join(pairs)}}}\n".encode()


def _set_damage_aside(path: Path) -> None:
    """Keep a log with lines that cannot be read under another name, and its other lines in its place."""
    whole, is_damaged = whole_lines(path)
    if not is_damaged:
        return
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    aside = next(each for each in names if not each.exists())
    _LOG.warning(
        "%s has lines that cannot be read; it is now %s, and the lines that can be read stay",
        *(path, aside.name),
    )
    new = path.with_name(f"{path.name}.tmp")
    new.write_bytes(whole)
    path.rename(aside)
    new.rename(path)


class _Csv(_JsonLines):
    """A table of rows below a header, which is written with the first row."""

    begin = b"step,time,"

    def _open(self) -> None:
        super()._open()
        self._columns = heading(self._path)

    def put(self, line: Line) -> None:
        """Add a line; values of new names make the table wider."""
        new = [name for name in line if name not in self._columns]
        if new and self.last:
            self._widen(new)
        elif new:
            self._columns = list(line)
        super().put(line)

    def _widen(self, new: list[str]) -> None:
        """Write the file anew with more columns; it has its name once it is whole."""
        lines = [line for _, _, line in placed_lines(self._path)]
        self._columns = columns = [*self._columns, *new]
        data = b"".join(
            self._encoded(line, is_first=not number) for number, line in enumerate(lines)
        )
        path = self._path.with_name(f"{self._path.name}.tmp")
        path.write_bytes(data)
        path.replace(self._path)
        self._close()
        self._open()
        self._columns = columns  # the file may have been empty

    def _encoded(self, line: Line, *, is_first: bool) -> bytes:
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        if is_first:
            rows.writerow(self._columns)
        rows.writerow([line.get(name, "") for name in self._columns])
        return text.getvalue().encode(errors="backslashreplace")


class _Events:
    """The file of a run's events. Its processes add lines, one process at a time."""

    def __init__(self, path: Path) -> None:
        stem = path.with_suffix("")
        self._lock = FileLock(stem.with_name(f".{stem.name}.lock"))
        if self._lock.owner is not None:
            raise LogError(
                f"log_to: {stem} must be the log of one run at a time, got a second one beside "
                f"{self._lock.owner}; give each run a file of its own"
            )
        self._file = os.open(events_file(path), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        finalize(self, os.close, self._file)
        size = os.fstat(self._file).st_size
        # A line that was cut in its middle stays a line by itself, which readers skip.
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")
        self.plans: list[str] = []
        self._has_started = False
        self._newest: Mapping[str, object] = {}

    def start(self, step: int, process: Mapping[str, object]) -> None:
        if not self._has_started:
            self._has_started = True
            self.add({"event": "start", "step": step, **process, "plan": "\n".join(self.plans)})

    def add(self, event: Mapping[str, object]) -> None:
        if event != self._newest:
            self._newest = event
            os.write(self._file, f"{json.dumps({**event, 'time': time.time()})}\n".encode())


def _events_beside(path: Path) -> _Events:
    """Return the events of the run that this log is of."""
    events = _EVENTS.get(events_file(path)) or _Events(path)
    _EVENTS[events_file(path)] = events
    return events


_quoted = lru_cache(json.dumps)
_TABLES: dict[str, type[_JsonLines]] = {".jsonl": _JsonLines, ".csv": _Csv}
_LOGS: WeakValueDictionary[Path, LogFile] = WeakValueDictionary()
_EVENTS: WeakValueDictionary[Path, _Events] = WeakValueDictionary()
