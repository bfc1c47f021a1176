"""Write the lines of a log, each one a step after its values were computed: so no step waits for them."""

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
from accel_fn.observe.log_writers import LogFile, Write, as_writer, open_log, write_settings
from accel_fn.parallel.launch_options import launch_options

_LOG = logging.getLogger(__name__)
_IMPORTED = time.time()
_END_S = 10.0
"""The longest time that the end of a process waits for the last values: a device may hang."""


class Recorder:
    """Reads a line's values one step later, and writes them.

    It outlives the step, since it writes the last line after the step is deleted.
    """

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
            file.plans.append(plan)
            file.recorders.add(self)
        self._prefix, self._plan = prefix, plan
        self._delayed = DelayedFloats()
        self._line: tuple[int, float] | None = None
        """Step and time of the line whose values are being copied from the device."""
        self.step: int | None = None
        """The newest step; None before the run begins."""

    def begin(self, state: DistState) -> None:
        """Begin to log, unless a load has begun the log; remove an earlier run's lines of later steps."""
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
        """Cut the log back to its state before an earlier step, which the program runs again."""
        self.flush()
        for file in self._files:
            file.rewind(step)

    def _start(self, state: DistState) -> None:
        if self.step is None:
            launch = asdict(launch_options())
            process: dict[str, object] = {
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
        """Add an event, if the run has begun."""
        if self.step is not None:
            for file in self._files:
                file.event(event, step, **facts)

    def read(self, step: int, values: Mapping[str, Any]) -> None:
        """Start to copy a line's values from the device; on a CPU, write the line immediately."""
        self._line = step, time.time()
        self._write_line(self._delayed(values, values["loss"].device))

    def flush(self, timeout_s: float | None = None) -> None:
        """Write the pending line: read its values, whose copy from the device has begun earlier."""
        if self._line is not None:
            self._write_line(self._delayed.last(timeout_s))

    def _write_line(self, values: Mapping[str, float] | None) -> None:
        if self._line is None or values is None:
            return
        step, at = self._line
        self._line = None
        self.write(step, at, values)

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Write a line with the values of this step."""
        if self._prefix:
            values = {f"{self._prefix}{name}": value for name, value in values.items()}
        for file in self._files:
            # Steps in a file must rise, so first flush the older lines of plans that run less
            # often. Skip this for one plan: a walk over weak references would take a tenth of the
            # time of a line.
            for other in file.recorders if len(file.recorders) > 1 else ():
                if other._line is not None and other._line[0] < step:
                    other.flush()
            file.values(step, at, values)
        for write in self._writes:
            write(step, dict(values))

    def end(self, process: int) -> None:
        """Write the last line, and the event that ends the run."""
        # Skip processes that this one forked.
        if os.getpid() != process or self.step is None:
            return
        step = self._line[0] if self._line else self.step
        try:
            self.flush(_END_S)
        except Exception as error:
            # Do not raise at exit. The program may, for example, have closed a tracker.
            _LOG.warning("log_to: the line of step %d is not written: %r", step, error)
        # The error that ends this process, if there is one.
        last = getattr(sys, "last_value", None)
        # At a prompt, an error does not end the process.
        ends = last is not None and not hasattr(sys, "ps1")
        self.event("end", self.step, error=type(last).__name__ if ends else None)


def path_of(given: object) -> Path | None:
    return Path(os.path.expanduser(given)) if isinstance(given, str | os.PathLike) else None


def _process_began() -> float:
    """Return the time at which this process began; if unknown, when it imported this file."""
    try:
        began = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        up = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - up + float(began) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return _IMPORTED
