"""Observers: they watch the steps and events of a run, and do not change its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from time import perf_counter
from typing import Any

from accel_fn.core.report import Report
from accel_fn.core.state import DistState, Watchdog, step_name


class Observer:
    """Watches a step and the events around it. Override the methods that you need.

    A function `(plan, strategy, state) -> Observer` makes it: in `Plan.observers`, or among the
    `checks` of `build`. Checks, logs, profiles and hang detection are observers. `load` does not
    compare observers, so you may add them to a run, or remove them.

    An error that `before` raises on one rank reaches the other ranks with the batch, and all raise.
    Any other method that may raise must raise on all ranks, for example after `gather`.

    >>> import accel_fn as af
    >>> class Spikes(af.extend.Observer):
    ...     def __init__(self, plan, strategy, state):
    ...         self.largest = 0.0
    ...     def wants(self, state):
    ...         return state.step % 2 == 0
    ...     def after(self, state, batch, report):
    ...         self.largest = max(self.largest, float(report.loss))
    >>> plan = af.Plan(loss_fn, model, optimizer, observers=(Spikes,))
    >>> state, step = af.build(plan, af.DistState())
    >>> for _ in range(3):
    ...     state, report = step(state, batch)
    """

    def wants(self, state: DistState) -> bool:
        """Return whether to watch the step that begins with this state. Every step calls it.

        It must return the same on all ranks if `before` or `after` calls collectives.
        """
        return True

    def before(self, state: DistState, batch: Any) -> None:
        """Inspect this rank's batch before the step runs it."""

    def on_outcome(self, rows: Any, outcome: Any) -> None:
        """Inspect a micro-batch and its `(loss, metrics)`, before the backward.

        A step that `compiled(scope="step")` runs as one graph does not call this method.
        """

    def on_update(self, state: DistState, grads: Any, report: Report) -> None:
        """Inspect the gradients that the optimizer gets, before anything is written.

        The report's loss and weight are those of the global batch, so all ranks may raise because
        of them. A step that `compiled(scope="step")` runs as one graph does not call this method.
        """

    def after(self, state: DistState, batch: Any, report: Report) -> None:
        """Inspect the state that the step returns, and its report. The update has been made.

        `step.grads` passes a report whose `applied` is None; `step.update` passes no batch.
        """

    def failed(self, state: DistState, error: BaseException) -> None:
        """Record that the step that began with this state raised an error, even if it was not watched."""

    def saved(self, state: DistState, seconds: float, folder: Path) -> None:
        """Record a checkpoint, and how many seconds the loop has waited for it."""

    def loaded(self, state: DistState, seconds: float, folder: Path) -> None:
        """Continue at the position of a checkpoint."""

    def evaluated(self, state: DistState, seconds: float) -> None:
        """Record a pass over a loader by `evaluate` or `predict`, and its duration."""


ObserverFn = Callable[..., Observer]
"""A function `(plan, strategy, state) -> Observer`."""


class FailedBatch:
    """A placeholder for a batch that an observer refused on this rank. `cut` raises its error."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Observers:
    """The observers of a step, and those among them that watch the current step."""

    def __init__(self, every: Sequence[Observer]) -> None:
        self.every = tuple(every)
        self.due: list[Observer] = []
        self.of_outcomes: list[Observer] = []
        """The observers in `due` that override `on_outcome`."""
        self.of_updates: list[Observer] = []
        """The observers in `due` that override `on_update`."""
        self._look_at_outcomes = [
            each for each in every if type(each).on_outcome is not Observer.on_outcome
        ]
        self._look_at_updates = [
            each for each in every if type(each).on_update is not Observer.on_update
        ]

    def before(self, state: DistState, batch: Any) -> Any:
        """Call `before` of the observers of this step; return the batch, or a `FailedBatch` if one raised."""
        # `filter` and `methodcaller` are written in C, so they are fast. In most steps, `wants` is
        # the only method of an observer that runs.
        self.due = due = [*filter(methodcaller("wants", state), self.every)]
        self.of_outcomes = [*filter(self._look_at_outcomes.__contains__, due)]
        self.of_updates = [*filter(self._look_at_updates.__contains__, due)]
        failure: Exception | None = None
        for each in due:
            try:
                each.before(state, batch)
            except Exception as error:
                # Run the remaining observers too: they may call collectives, in which the other
                # ranks would wait for this rank.
                failure = failure or error
        return batch if failure is None else FailedBatch(failure)

    def on_outcome(self, rows: Any, outcome: Any) -> None:
        """Pass a micro-batch and its `(loss, metrics)` to the observers."""
        for each in self.of_outcomes:
            each.on_outcome(rows, outcome)

    def on_update(self, state: DistState, grads: Any, report: Report) -> None:
        """Pass the gradients of the update to the observers."""
        for each in self.of_updates:
            each.on_update(state, grads, report)

    def after(self, state: DistState, batch: Any, report: Report) -> None:
        """Call `after` of the observers of this step in reverse order: the one that began first ends last."""
        for each in reversed(self.due):
            each.after(state, batch, report)

    def failed(self, state: DistState, error: BaseException) -> None:
        """Notify all observers that a step has raised."""
        for each in self.every:
            each.failed(state, error)

    @contextmanager
    def evaluating(self, state: DistState) -> Iterator[None]:
        """Time a pass over a loader, and pass the seconds to the observers."""
        began = perf_counter()
        yield
        seconds = perf_counter() - began
        for each in self.every:
            each.evaluated(state, seconds)


class WatchedSteps(Observer):
    """Notifies the watchdog of a state when steps begin, end and fail."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def before(self, state: DistState, batch: Any) -> None:
        """Record the step that begins."""
        self._watchdog.begin_step(step_name(state.step + 1, state.call))

    def after(self, state: DistState, batch: Any, report: Report) -> None:
        """Record the end of the step."""
        self._watchdog.end_step()

    def failed(self, state: DistState, error: BaseException) -> None:
        """If the step failed because a rank is gone, raise an error that names the rank."""
        try:
            if isinstance(error, RuntimeError):
                self._watchdog.diagnose(error, "step")
        finally:
            self._watchdog.end_step()
