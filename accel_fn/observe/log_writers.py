"""Write logs to files of values and events, and to runs of trackers."""

from __future__ import annotations

import atexit
import csv
import io
import itertools
import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakSet, WeakValueDictionary, finalize

from accel_fn.core.warn import warn_user
from accel_fn.errors import ArgumentTypeError, LogError, message
from accel_fn.parallel.file_lock import FileLock

_LOG = logging.getLogger(__name__)
EVENTS = ".events.jsonl"
SUFFIXES = (".csv", ".jsonl")
_LARGEST, _LONGEST_S = 2**63, 1e12
Line = dict[str, float]
T = TypeVar("T")
Write = Callable[[int, Mapping[str, float]], None]


def open_log(path: Path) -> LogFile:
    """Open the log of a run, which plans of one process share."""
    path = Path(os.path.abspath(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path = path.parent.resolve() / path.name
        log = _LOGS.get(path)
        if log is None:
            _check_log(path)
            log = _LOGS[path] = LogFile(path)
    except OSError as error:
        raise LogError(
            f"log_to: writers must be files that can be written, got {path}: {error.strerror}"
        ) from error
    return log


def _check_log(path: Path) -> None:
    """Refuse a file that is not a log, since a log drops lines that it cannot read."""
    begin = _TABLES[path.suffix].begin
    with path.open("a+b") as file:
        file.seek(0)
        found = file.read(len(begin))
    # A log that another program has cut may be shorter than `begin`, or begin with zeros.
    is_log = begin.startswith(found) or found.startswith(b"\0") or events_file(path).exists()
    if not is_log:
        raise LogError(
            f"log_to: writers must be new files or logs, got {path}, which holds something else; give "
            "the log a name of its own"
        )


class LogFile:
    """Writes values and events of a run to files; the run continues if that fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        beside = events_file(path)
        self._events = _EVENTS.get(beside) or _Events(path)
        _EVENTS[beside] = self._events
        self.plans = self._events.plans
        """The texts of the plans that write values to this log."""
        self._table = _TABLES[path.suffix](path)
        self._has_begun = False
        self._has_warned = False
        self._has_warned_of_two = False
        self.recorders: WeakSet[Any] = WeakSet()
        """The recorders that write to this log, one per plan."""

    def note_process(self, step: int, process: Mapping[str, object]) -> None:
        """Record, once, that a process begins to log."""
        self._try(lambda: self._events.start(step, process))

    def begin_run(self, step: int) -> None:
        """If the log has steps after the step at which a new run begins, copy it, and remove these steps."""
        # Another plan of the run may already have logged the batch with which this plan begins.
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
        """Remove the line of a step that runs again, and later lines, unless another plan did so."""
        if self._last_step > step:
            self._try(lambda: self._table.cut(step - 1))

    def event(self, event: str, step: int, **facts: object) -> None:
        """Add an event, unless another plan of the process has just added it."""
        self._try(lambda: self._events.add({"event": event, "step": step, **facts}))
        # Check that the file is still there only at events, which are rare: a check at each line
        # would slow the steps.
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
        """Warn if this step's line already has another value under one of these names."""
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
    """A file with a JSON object for each step, in order; the newest step's object may grow."""

    begin = b'{"step": '

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            _set_damage_aside(path)
        self._open()

    def put(self, line: Line) -> None:
        """Add a line, or add the values to the last line if that belongs to the same step."""
        is_same = line["step"] == self.last.get("step")
        end = os.fstat(self._file).st_size
        # If another program has cut the file, as logrotate does, the last line is gone: append a
        # new one.
        start = self._start if is_same and end == self._end else end
        self._put_at(start, {**self.last, **line} if is_same else line)

    def is_in_place(self) -> bool:
        """Return whether the path still leads to the open file."""
        with suppress(OSError):
            return os.path.samestat(self._path.stat(), os.fstat(self._file))
        return False

    def cut(self, step: float) -> None:
        """Remove the lines of steps after `step`."""
        self._start, self._end = 0, 0
        self.last: Line = {}
        for start, end, line in placed_lines(self._path):
            if line["step"] > step:
                break
            self._start, self._end, self.last = start, end, line
        os.ftruncate(self._file, self._end)

    def _open(self) -> None:
        """Open the file, and drop an incomplete last line."""
        # Open to append. Otherwise, after another program has truncated the file, a write at the
        # old position would fill the gap with zeros.
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
        except OSError:
            # The disk may be full. Remove the half-written line, which would spoil the next one.
            os.ftruncate(self._file, start)
            raise

    def _encoded(self, line: Line, *, is_first: bool) -> bytes:
        # Write null for nan and infinity, which JSON does not have and only Python's readers
        # accept. Format numbers directly, since a JSON encoder takes twice as long.
        pairs = [
            f"{_quoted(name)}: {each if math.isfinite(each) else 'null'}"
            for name, each in line.items()
        ]
        return f"{{{', '.join(pairs)}}}\n".encode()


def _set_damage_aside(path: Path) -> None:
    """Rename a log that has damaged lines; copy its readable lines to a new log under the old name."""
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
    """A table of rows below a header; the header is written with the first row."""

    begin = b"step,time,"

    def _open(self) -> None:
        super()._open()
        self._columns = heading(self._path)

    def put(self, line: Line) -> None:
        """Add a line; new names add columns to the table."""
        new = [name for name in line if name not in self._columns]
        if new and self.last:
            self._widen(new)
        elif new:
            self._columns = [*line]
        super().put(line)

    def _widen(self, new: list[str]) -> None:
        """Write the file again with more columns; replace the old file when that is done."""
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
        # `_open` reads the columns from the header, but an empty file has none. So set them again.
        self._columns = columns

    def _encoded(self, line: Line, *, is_first: bool) -> bytes:
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        if is_first:
            rows.writerow(self._columns)
        rows.writerow([line.get(name, "") for name in self._columns])
        return text.getvalue().encode(errors="backslashreplace")


class _Events:
    """The file of a run's events, to which the run's processes append, one process at a time."""

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
        # End an incomplete last line, so that it does not spoil the next one. Readers skip it.
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


_quoted = lru_cache(json.dumps)
_TABLES: dict[str, type[_JsonLines]] = {".jsonl": _JsonLines, ".csv": _Csv}
_LOGS: WeakValueDictionary[Path, LogFile] = WeakValueDictionary()
_EVENTS: WeakValueDictionary[Path, _Events] = WeakValueDictionary()


def log_lines(file: Path, most: int | None = None) -> Iterator[dict[str, float]]:
    """Read the lines of a log that `log_to` wrote: `step` and the other values, by name.

    Lines that were cut or damaged are left out, and values that are not numbers. A value that is
    not finite is nan.

    Args:
        file: a .jsonl or a .csv, which may be missing.
        most: the largest number of lines to read; default: all.

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

    Each event has `event`, the integer `step` and the number `time`, in seconds since 1970. They
    are in `NAME.events.jsonl`, in the folder of the log.

    >>> from pathlib import Path
    >>> from accel_fn.extend import log_events
    >>> log_events(Path("runs/missing/log.jsonl"))
    []
    """
    return [each for _, _, each in _placed(events_file(file), _object_of) if _is_event(each)]


def events_file(file: Path) -> Path:
    """Return the file of the run's events, which a .csv and a .jsonl of the same name share."""
    return file.with_name(file.stem + EVENTS)


def _is_event(found: dict[str, Any]) -> bool:
    return (
        isinstance(found.get("event"), str)
        and _is_step(found.get("step"))
        and _is_number(found.get("time"))
        and abs(found["time"]) < _LONGEST_S
    )


def placed_lines(file: Path, most: int | None = None) -> Iterator[tuple[int, int, Line]]:
    """Yield start, end and numeric values of each line that has a step."""
    parse = _row_parser() if file.suffix == ".csv" else _object_of
    for start, end, found in _placed(file, parse, most):
        if _is_step(found.get("step")):
            # In JSON, null stands for a number that is not finite.
            values = {name: math.nan if each is None else each for name, each in found.items()}
            yield start, end, {name: value for name, value in values.items() if _is_number(value)}


def whole_lines(file: Path) -> tuple[bytes, bool]:
    """Return the readable lines of a log, and whether it has damaged lines."""
    data = file.read_bytes()
    places = [(start, end) for start, end, _ in placed_lines(file)]
    if file.suffix == ".csv" and "step" in heading(file):
        places.insert(0, (0, data.index(b"\n") + 1))
    whole = b"".join(data[start:end] for start, end in places)
    # An incomplete last line is not damage: a process may have ended while it wrote the line.
    return whole, whole != data[: data.rfind(b"\n") + 1]


def heading(file: Path) -> list[str]:
    """Return the column names of a CSV file; an empty list if it has no complete line."""
    return next((parsed for _, _, parsed in _placed(file, _row_of)), [])


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_number(value: Any) -> bool:
    """Return whether a value is a float, or an integer of at most 64 bits."""
    return type(value) is float or (type(value) is int and abs(value) < _LARGEST)


def _placed(
    file: Path, parse: Callable[[str], T | None], most: int | None = None
) -> Iterator[tuple[int, int, T]]:
    """Yield start, end and content of each line that can be parsed.

    The file may be missing, and lines may be incomplete or damaged.
    """
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
    # `csv` refuses a cell that is too long, which a damaged file may have.
    with suppress(csv.Error):
        return next(csv.reader([line]), None)
    return None


def _row_parser() -> Callable[[str], dict[str, Any] | None]:
    """Make a parser of rows with as many cells as the first row; it leaves out empty cells."""
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


def as_writer(given: Any) -> Write:
    """Return a function that writes a step's values to a run; return a given function unchanged.

    It does not accept paths. It recognises runs by the names of their types, so it imports no
    library. Call it only on the main rank, which has the run.
    """
    check_writer(given)
    kind = _kind_of(given)
    write: Write = given if kind is None else kind[0](given)
    return write


def check_writer(given: object) -> None:
    """Refuse a value that is neither a run of a known library nor a function."""
    # Refuse a class, although it is callable: the user may have written SummaryWriter instead of
    # SummaryWriter().
    if _kind_of(given) is None and (not callable(given) or isinstance(given, type)):
        rule = (
            "be a path that ends in .jsonl or .csv, a run of tensorboard, tensorboardX, wandb, mlflow, "
            "trackio, aim or swanlab, or a function (step, values)"
        )
        raise ArgumentTypeError(message("log_to", "writers", rule, given))


def write_settings(given: object, plan: str, launch: Mapping[str, object]) -> None:
    """Write a plan's text and launch settings to a run; do nothing for a function.

    Call it before the first values, since trackio stores the settings with them. A resumed run
    overwrites the settings.
    """
    kind = _kind_of(given)
    if kind is not None:
        kind[1](given, {"plan": plan, **launch})


def _tensorboard(writer: Any) -> Write:
    # Close the writer at exit: its thread is a daemon, so the last events would be lost.
    atexit.register(writer.close)

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write


def _tensorboard_settings(writer: Any, settings: Mapping[str, object]) -> None:
    plan, *others = (f"{name}: {value}" for name, value in settings.items())
    lines = [*plan.removeprefix("plan: ").splitlines(), *others]
    # TensorBoard renders the text as Markdown, which leaves indented lines unchanged.
    writer.add_text("accel_fn", "\n".join(f"    {line}" for line in lines), 0)


def _with_log(run: Any) -> Write:
    return lambda step, values: run.log(dict(values), step=step)


def _wandb_settings(run: Any, settings: Mapping[str, object]) -> None:
    run.config.update({"accel_fn": settings}, allow_val_change=True)


def _config_settings(run: Any, settings: Mapping[str, object]) -> None:
    run.config.update({"accel_fn": settings})


def _mlflow(given: Any) -> Write:
    # Look up the run once: after the end of the active run, `mlflow` would start another one.
    run_id = _mlflow_run(given).info.run_id
    log_metrics = sys.modules["mlflow"].log_metrics
    return lambda step, values: log_metrics(dict(values), step=step, run_id=run_id)


def _mlflow_settings(given: Any, settings: Mapping[str, object]) -> None:
    run, client = _mlflow_run(given), sys.modules["mlflow"].MlflowClient()
    # Write tags, not parameters: a run's parameters cannot change, and a resumed run may have
    # another world size.
    for name, value in settings.items():
        client.set_tag(run.info.run_id, f"accel_fn.{name}", str(value))


def _mlflow_run(given: Any) -> Any:
    is_module = isinstance(given, ModuleType)
    return given.active_run() or given.start_run() if is_module else given


def _aim(run: Any) -> Write:
    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            run.track(value, name=name, step=step)

    return write


def _aim_settings(run: Any, settings: Mapping[str, object]) -> None:
    run["accel_fn"] = settings


_Kind = tuple[Callable[[Any], Write], Callable[[Any, Mapping[str, object]], None]]
_TENSORBOARD: _Kind = (_tensorboard, _tensorboard_settings)
_WANDB: _Kind = (_with_log, _wandb_settings)
_MLFLOW: _Kind = (_mlflow, _mlflow_settings)
_CONFIGURED: _Kind = (_with_log, _config_settings)

_KINDS: dict[str, _Kind] = {
    "torch.SummaryWriter": _TENSORBOARD,
    "tensorboardX.SummaryWriter": _TENSORBOARD,
    "wandb.Run": _WANDB,
    "wandb": _WANDB,
    "mlflow.Run": _MLFLOW,
    "mlflow": _MLFLOW,
    "trackio.Run": _CONFIGURED,
    "trackio": _CONFIGURED,
    "swanlab.Run": _CONFIGURED,
    # swanlab's name for `Run` before version 0.8.
    "swanlab.SwanLabRun": _CONFIGURED,
    "swanlab": _CONFIGURED,
    "aim.Run": (_aim, _aim_settings),
}
"""Kinds of runs by library and class, or by a module that represents the active run."""


def _kind_of(given: object) -> _Kind | None:
    """Find the kind of a run by its class, a base class, or its module."""
    if isinstance(given, ModuleType):
        return _KINDS.get(given.__name__)
    names = (f"{each.__module__.split('.')[0]}.{each.__name__}" for each in type(given).__mro__)
    return next((_KINDS[name] for name in names if name in _KINDS), None)
