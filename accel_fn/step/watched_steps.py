"""The watchdog as an observer of steps: a hang report names the step that a rank is in."""

from __future__ import annotations

from typing import Any

from accel_fn.base.state import DistState, Watchdog, step_name
from accel_fn.step.observers import Observer
from accel_fn.step.report import Report


class WatchedSteps(Observer):
    """Tells the watchdog of a state when steps begin, end and fail."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def before(self, state: DistState, batch: Any) -> None:
        """Note the step that begins."""
        self._watchdog.begin_step(step_name(state.step + 1, state.call))

    def after(self, state: DistState, batch: Any, report: Report) -> None:
        """Note its end."""
        self._watchdog.end_step()

    def failed(self, state: DistState, error: BaseException) -> None:
        """Raise an error that names the ranks if the step failed because one of them is gone."""
        try:
            if isinstance(error, RuntimeError):
                self._watchdog.diagnose(error, "step")
        finally:
            self._watchdog.end_step()
