"""Recorder: the values of a line, read from the device one step later and written to files and trackers."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accel_fn.core.delayed_read import DelayedFloats
from accel_fn.core.state import DistState
from accel_fn.observe.log_files import LogFile, open_log
from accel_fn.observe.writers import Write, as_writer, write_settings
from accel_fn.parallel.launch_options import launch_options

_LOG = logging.getLogger(__name__)
_IMPORTED = time.time()
_END_S = 10.0
"""How long the end of a process waits for the last values: a device may hang."""


class Recorder:
    """Reads the values of a line one step later and writes them; it outlives its step by one line."""

    def __init__(self, writers: Sequence[object], prefix: str, plan: str) -> None:
        self._files: list[LogFile] = []
        self._trackers: list[object] = []
        self._writes: list[Write] = []
        for each in writers:
            path = path_of(each)
            if path is None:
                self._trackers.append(each)
                self._writes.append(as_writer(each))
            else:
                self._files.append(open_log(path))
        for file in self._files:
            file.add_plan(plan)
            file.recorders.add(self)
        self._prefix, self._plan = prefix, plan
        self._delayed = DelayedFloats()
        self._line: tuple[int, float] | None = None
        """Step and time of the line whose values are copied from the device."""
        self.step: int | None = None
        """The newest step; None before the run begins."""

    def begin(self, state: DistState) -> None:
        """Begin to log, where nothing was loaded: what an earlier run has logged of later steps goes."""
        if self.step is None:
            self._start(state)
            for file in self._files:
                file.begin_run(state.step)

    def resume(self, state: DistState, seconds: float, folder: Path) -> None:
        """Continue from the step of a checkpoint."""
        self._delayed.last()
        self._line = None
        self._start(state)
        for file in self._files:
            file.resume(state.step, seconds, folder)

    def rewind(self, step: int) -> None:
        """Cut the log back to where it was before an earlier step, which the program runs again."""
        self.flush()
        for file in self._files:
            file.rewind(step)

    def _start(self, state: DistState) -> None:
        if self.step is None:
            launch = asdict(launch_options())
            process = {
                "process_began": _process_began(),
                "world_size": state.world_size,
                "device": str(state.device),
                "launch": launch,
            }
            for file in self._files:
                file.note_process(state.step, process)
            for tracker in self._trackers:
                write_settings(tracker, self._plan, launch)
        self.step = state.step

    def event(self, event: str, step: int, **facts: object) -> None:
        """Add an event of a run that has begun."""
        if self.step is not None:
            for file in self._files:
                file.event(event, step, **facts)

    def read(self, step: int, values: Mapping[str, Any]) -> None:
        """Copy the values of a line from the device; those of a CPU are written at once."""
        self._line = step, time.time()
        self._write_line(self._delayed(values, values["loss"].device))

    def flush(self, timeout_s: float | None = None) -> None:
        """Write the line whose values were copied."""
        if self._line is not None:
            self._write_line(self._delayed.last(timeout_s))

    def _write_line(self, values: Mapping[str, float] | None) -> None:
        if self._line is None or values is None:
            return
        step, at = self._line
        self._line = None
        self.write(step, at, values)

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Write a line of this step."""
        if self._prefix:
            values = {f"{self._prefix}{name}": value for name, value in values.items()}
        for file in self._files:
            if len(file.recorders) > 1:  # a walk over weak references would be a tenth of the line
                self._write_earlier_lines(file, step)
            file.values(step, at, values)
        for write in self._writes:
            write(step, dict(values))

    def _write_earlier_lines(self, file: LogFile, step: int) -> None:
        """Write the lines of plans that run less often, so that steps rise; their values are older."""
        for other in file.recorders:
            if other._line is not None and other._line[0] < step:
                other.flush()

    def end(self, process: int) -> None:
        """Write the last line, and that the run has ended in order."""
        if os.getpid() != process or self.step is None:  # not in a process that it forked
            return
        step = self._line[0] if self._line else self.step
        try:
            self.flush(_END_S)
        except Exception as error:  # a tracker that the program has closed
            _LOG.warning("log_to: the line of step %d is not written: %r", step, error)
        self.event("end", self.step, error=_name_of_last_error())


def path_of(given: object) -> Path | None:
    return Path(os.path.expanduser(given)) if isinstance(given, str | os.PathLike) else None


def _process_began() -> float:
    """Return when this process began, or when it imported this file where only that is known."""
    try:
        began = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        up = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - up + float(began) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return _IMPORTED


def _name_of_last_error() -> str | None:
    """Return the type of the error that ends this process, if one does."""
    error = getattr(sys, "last_value", None)
    # In a session at a prompt, an error ends no process.
    return None if error is None or hasattr(sys, "ps1") else type(error).__name__
