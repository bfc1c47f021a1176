"""log_to: write the results of steps to files and trackers, without waiting for the device."""

from __future__ import annotations

import atexit
import numbers
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import finalize

from torch import Tensor
from torch.optim import Optimizer

from accel_fn.core.collectives import any_rank
from accel_fn.core.loop import Strategy
from accel_fn.core.observers import Observer
from accel_fn.core.plan import Plan, SlotFunction
from accel_fn.core.report import Report, verdict_of
from accel_fn.core.state import DistState, check_state
from accel_fn.core.step import Step
from accel_fn.core.transform import Transform, fill, named
from accel_fn.errors import (
    UNPRINTABLE,
    ArgumentError,
    ArgumentTypeError,
    PlanError,
    StateError,
    check_count,
    message,
)
from accel_fn.observe.explain import explain
from accel_fn.observe.log_writers import (
    EVENTS,
    SUFFIXES,
    check_writer,
)
from accel_fn.observe.over_loader import check_step
from accel_fn.observe.recorder import Recorder, path_of
from accel_fn.observe.step_measures import LoopWait, Memory, Throughput

_NAMES = (
    "step",
    "time",
    "loss",
    "learning_rate",
    "grad_norm",
    "loss_scale",
    "skipped_updates",
    "samples_per_second",
    "items_per_second",
    "data_wait",
    "peak_memory",
)
"""The names of the step's own values in a line; a user's values may not have these names."""


def log_to(*writers: object, every: int = 10, prefix: str = "") -> Transform:
    """Log the results of steps on the main rank: loss, metrics, learning rates, throughput.

    Values are copied from the device and read one step later, so no step waits for them. `save`, `evaluate`,
    `predict` and the end of the process read the last ones.

    A line has `loss`, `loss/<term>` if `weight_fn` is a mapping, `learning_rate`
    (`learning_rate/<group>`, `learning_rate/<optimizer>` or `learning_rate/<optimizer>/<group>` if
    there are several), `grad_norm` if the report has one, `loss_scale`, `skipped_updates` since the
    previous line if updates can be skipped, `samples_per_second`, `items_per_second` by
    `weight_fn`, `data_wait` (the fraction of the time that the loop spent between steps, without
    saves, loads and evaluations), `peak_memory` in bytes (of the device, or of the process on a
    CPU; at most a second old), and the metrics of `loss_fn`.

    A path gets a line a step, and `load` and `resume` cut it back, so a resumed run continues in the same
    log and no step is in it twice. Beside it, `<name>.events.jsonl` lists starts, saves, loads,
    evaluations and ends of the run.

    Law: the step computes the same bits as without it. The log is the same for all numbers of ranks
    and micro-batches, except for times. Tests: `tests/observe/test_log_to.py`.

    Args:
        *writers: each a path that ends in .jsonl (one object per line) or .csv, where `~` is your
            home folder; or a function `(step, values)`, called on the main rank with a dict of
            floats by name. None writes nothing: `log_to(None)` makes no log, and on ranks other
            than the main one a writer may be None.
        every: number of steps between lines, as `state.step` counts them.
        prefix: begins all names, if several plans of a program share a log: "generator/".

    Returns:
        A transform. `load` does not compare it, so a log may be added to a run, or removed.

    Raises:
        ValueError: there are no `writers`, or one is of another kind; `every` is not an integer >=
            1; `prefix` is not one line of text. From the first step: a metric has the name of
            another value of the line, or a name that cannot be printed in one line.
        RuntimeError: from `build`, on every rank: a file cannot be written or holds something else, or
            another process logs to it.
        Exception: raised by a tracker or a function, from the step on the main rank.

    Warns:
        UserWarning: once, on the main rank: the disk is full, or a file cannot be written any more; a save,
            an evaluation or the end of the run finds a file removed, renamed or replaced; two plans log to
            one file under the same names.

    Cost: two readings of the clock a step. For a line, a few small kernels, one copy to the host and one
    write. Where only the device knows whether an update is skipped, one kernel a step.

    >>> import accel_fn as af
    >>> plan = af.Plan(loss_fn, model, optimizer)
    >>> plan = af.log_to(lambda step, values: print(step, sorted(values)[:3]), every=2)(plan)
    >>> state, step = af.build(plan, af.DistState())
    >>> for _ in range(2):
    ...     state, report = step(state, batch)
    2 ['data_wait', 'learning_rate', 'loss']
    """
    if not writers:
        raise ArgumentError(
            "log_to: writers must be at least one, got none; log_to(None) makes no log"
        )
    for each in writers:
        _check_writer(each)
    check_count("log_to", "every", every)
    if not isinstance(prefix, str) or len(prefix.splitlines()) > 1:
        raise ArgumentTypeError(message("log_to", "prefix", "be text of one line", prefix))
    named_by = [path_of(each) or getattr(each, "__name__", type(each).__name__) for each in writers]
    settings = [f"every={every}"] + [f"prefix={prefix!r}"] * bool(prefix)
    slot = SlotFunction(build_log, writers=writers, every=every, prefix=prefix)
    made = named(fill(observers=slot), f"log_to({', '.join(settings)})")
    if all(each is None for each in writers):
        named_by = ["no writer"]
    slot.source = f"to {' and '.join(map(str, named_by))}"
    return made


def log_values(
    step: Step, state: DistState, values: Mapping[str, Any], *, prefix: str = ""
) -> None:
    """Log your own values with those of the newest step, such as the result of `evaluate`.

    They are in the line of the step if it has one, else in a separate line. Called on every rank;
    the main rank writes.

    Args:
        step: a step whose plan has a log, from `log_to`.
        state: the state after the newest step.
        values: numbers, or tensors with one element, by name.
        prefix: begins all names, such as "validation/".

    Raises:
        ValueError: on every rank: a value is not a number, a name is already used by the step, such
            as "loss", the plan has no log, or a later step than `state.step` has run.

    Cost: no collective; a value that is on a device is waited for.

    >>> import accel_fn as af
    >>> plan = af.log_to(lambda step, values: print(step, *values))(af.Plan(loss_fn, model, optimizer))
    >>> state, step = af.build(plan, af.DistState())
    >>> af.log_values(step, state, af.evaluate(step, state, [batch]), prefix="validation/")
    0 validation/loss
    """
    check_state("log_values", state)
    check_step("log_values", step, state)
    if not isinstance(values, Mapping):
        raise ArgumentTypeError(message("log_values", "values", "be numbers by name", values))
    for name, value in values.items():
        if not (isinstance(name, str) and _is_number(value)):
            rule, got = "be numbers by name", {name: value}
            raise ArgumentTypeError(message("log_values", "values", rule, got))
    logs = [each for each in step.observers.every if isinstance(each, Log)]
    if not logs:
        raise PlanError("log_values: step must have a log, got none; add log_to to its plan")
    given = {f"{prefix}{name}": value for name, value in values.items()}
    _check_names("log_values", "values", given, 'give a prefix, such as prefix="validation/"')
    for log in logs:
        log.add(state, given)


def build_log(
    plan: Plan,
    strategy: Strategy,
    state: DistState,
    *,
    writers: Sequence[object],
    every: int,
    prefix: str,
) -> Log:
    """Make the log of one step; if the main rank fails to open it, `build` raises on every rank."""
    has_writers = any_rank(any(each is not None for each in writers), state)
    if not state.is_main or not has_writers:
        return Log()
    return LogOnMain(state, plan, Recorder(writers, prefix, explain(plan, state)), every)


class Log(Observer):
    """Tracks the newest step on ranks that write nothing; `LogOnMain` writes."""

    def __init__(self) -> None:
        self._newest = 0
        """The number of the newest step."""
        self._has_checked = False

    def after(self, state: DistState, batch: Any, report: Report) -> None:
        """Record the newest step, unless `step.grads` has computed only its gradients."""
        if report.applied is None:
            return
        self._newest = _batch_number(state)
        if not self._has_checked:
            self._has_checked = True
            _check_names("log_to", "metrics", report.metrics, "rename them")

    def loaded(self, state: DistState, seconds: float, folder: Path) -> None:
        """Continue at the position of a checkpoint."""
        self._newest = _batch_number(state)

    def add(self, state: DistState, values: Mapping[str, Any]) -> None:
        """Refuse values of any step but the newest."""
        if _batch_number(state) < self._newest:
            raise StateError(
                f"log_values: state must be of the newest step, got step {_batch_number(state)} after step "
                f"{self._newest}"
            )


class LogOnMain(Log):
    """Writes the log of a step; only the main rank has one."""

    def __init__(self, state: DistState, plan: Plan, recorder: Recorder, every: int) -> None:
        super().__init__()
        self._optimizers, self._every = plan.optimizers, every
        self._throughput = Throughput(state, plan)
        self._waiting = LoopWait()
        self._memory = Memory(state.device)
        self._recorder = recorder
        # When the step is deleted, or the process ends, write the last line of the log. Exit
        # handlers run in reverse order, so this one runs before those of trackers, which were
        # registered earlier.
        atexit.register(finalize(self, recorder.end, os.getpid()))
        self._applied: int | Tensor | None = None if plan.always_applies(state) else 0
        self._num_updates = 0
        self._logged = -1
        self._rates: dict[str, Any] = {}
        """The learning rates that the running step uses; during the step, a schedule sets the next
        ones."""
        self._first: float | None = None
        """The time at which the first step began; None if that step is not running."""

    def before(self, state: DistState, batch: Any) -> None:
        """Record the start of a step, and the learning rates that the step uses."""
        if self._waiting.is_new:
            self._recorder.begin(state)
            self._first = perf_counter()
        self._waiting.begin_step()
        self._throughput.count(batch)
        if (state.step + 1) % self._every == 0:
            self._rates = _learning_rates(self._optimizers)

    def after(self, state: DistState, batch: Any, report: Report) -> None:
        """Count a step, and log it if its number is a multiple of `every`."""
        if report.applied is None:
            return
        if _batch_number(state) < self._newest:
            self._recorder.rewind(_batch_number(state))
        super().after(state, batch, report)
        self._recorder.step = self._newest
        self._recorder.flush()
        self._throughput.add(report)
        if self._applied is not None:
            self._num_updates += 1
            verdict = verdict_of(report)
            self._applied = self._applied + (bool(verdict) if verdict.is_cpu else verdict)
        # If a batch has several updates, only the first update is logged.
        if self._newest % self._every == 0 and self._newest != self._logged:
            self._log(state, report)
        if self._first is not None:
            self._recorder.event("first_step", self._newest, seconds=perf_counter() - self._first)
            self._first = None
        self._waiting.end_step()

    def saved(self, state: DistState, seconds: float, folder: Path) -> None:
        """Record a checkpoint."""
        self._waiting.pause(seconds)
        self._recorder.flush()
        self._recorder.event("save", _batch_number(state), seconds=seconds, folder=str(folder))

    def loaded(self, state: DistState, seconds: float, folder: Path) -> None:
        """Continue from the step of a checkpoint."""
        super().loaded(state, seconds, folder)
        self._waiting.pause(seconds)
        self._logged = -1
        self._recorder.resume(state, seconds, folder)

    def evaluated(self, state: DistState, seconds: float) -> None:
        """Record an evaluation."""
        self._waiting.pause(seconds)
        self._recorder.flush()
        self._recorder.event("evaluate", _batch_number(state), seconds=seconds)

    def add(self, state: DistState, values: Mapping[str, Any]) -> None:
        """Log values of the newest step."""
        super().add(state, values)
        self._recorder.begin(state)
        self._recorder.flush()
        found = {name: float(value) for name, value in values.items()}
        self._recorder.write(_batch_number(state), time.time(), found)

    def _log(self, state: DistState, report: Report) -> None:
        self._logged = self._newest
        elapsed, wait = self._waiting.since_last()
        values: dict[str, Any] = {"loss": report.loss}
        values |= {f"loss/{name}": value for name, value in report.terms.items()}
        values |= self._rates
        if report.grad_norm is not None:
            values["grad_norm"] = report.grad_norm
        if state.scaler is not None:
            values["loss_scale"] = state.scaler.scale
        if self._applied is not None:
            values["skipped_updates"] = self._num_updates - self._applied
            self._num_updates, self._applied = 0, 0
        values |= self._throughput.per_second(elapsed)
        values["data_wait"] = wait / elapsed
        values |= self._memory.peak()
        values |= report.metrics
        self._recorder.read(self._newest, values)


def _check_names(function: str, parameter: str, names: Iterable[str], repair: str) -> None:
    """Refuse names of the step's own values, and names that would break a line."""
    wrong = [name for name in names if name in _NAMES or UNPRINTABLE.search(name)]
    if wrong:
        rule = "have printable names of one line, other than those of the step's own values"
        raise ArgumentError(message(function, parameter, rule, wrong, repair))


def _batch_number(state: DistState) -> int:
    """Return the newest batch's number, from 1; `state.step` does not count an unfinished batch."""
    return state.step + bool(state.call)


def _learning_rates(optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    found = {}
    for name, optimizer in optimizers.items():
        of_optimizer = f"learning_rate/{name}" if len(optimizers) > 1 else "learning_rate"
        groups = optimizer.param_groups
        for index, group in enumerate(groups):
            # Adafactor's rate may be None: it then computes the rate itself.
            if group.get("lr") is not None:
                named = f"{of_optimizer}/{index}" if len(groups) > 1 else of_optimizer
                # Copy a rate that is a tensor: schedules write to it in place.
                rate = group["lr"]
                found[named] = rate.clone() if isinstance(rate, Tensor) else rate
    return found


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    if not isinstance(value, numbers.Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _check_writer(given: object) -> None:
    path = path_of(given)
    if path is None:
        # None is allowed: a program may make its tracker on one rank, and have None on the others.
        if given is not None:
            check_writer(given)
    elif path.suffix not in SUFFIXES or path.name.endswith(EVENTS):
        rule = "be paths that end in .jsonl or .csv, and not in .events.jsonl"
        raise ArgumentError(message("log_to", "writers", rule, str(path)))
