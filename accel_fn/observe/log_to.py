"""log_to: write the results of steps to files and trackers, without waiting for the device."""

from __future__ import annotations

import atexit
import logging
import math
import numbers
import os
import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel_fn.core.batch import count_samples
from accel_fn.core.collectives import any_rank
from accel_fn.core.delayed_read import DelayedFloats
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
    BatchError,
    PlanError,
    StateError,
    check_count,
    message,
)
from accel_fn.observe.explain import explain
from accel_fn.observe.log_writers import (
    EVENTS,
    SUFFIXES,
    LogFile,
    Write,
    as_writer,
    check_writer,
    open_log,
    write_settings,
)
from accel_fn.observe.over_loader import check_step
from accel_fn.parallel.launch_options import launch_options

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
_MEMORY_S = 1.0
"""Seconds for which a reading of the peak memory is reused, since reading it is slow."""
_LOG = logging.getLogger(__name__)
_IMPORTED = time.time()
_END_S = 10.0
"""The longest time that the end of a process waits for the last values: a device may hang."""


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


class LoopWait:
    """Measures the loop's time between steps, since the last line."""

    def __init__(self) -> None:
        self._last = self._ended = self._waited = self._paused = 0.0
        self._in_step = False
        self.is_new = True
        """Whether no step has begun yet."""

    def begin_step(self) -> None:
        # If a step has begun already, an earlier call has computed the gradients for the update of
        # this call.
        if self._in_step:
            return
        now = perf_counter()
        if self.is_new:
            self.is_new, self._last = False, now
        else:
            self._waited += max(now - self._ended - self._paused, 0.0)
        self._paused, self._in_step = 0.0, True

    def end_step(self) -> None:
        self._ended, self._in_step = perf_counter(), False

    def pause(self, seconds: float) -> None:
        """Exclude time that was spent on a checkpoint or an evaluation."""
        self._paused += seconds

    def since_last(self) -> tuple[float, float]:
        """Return the seconds since the last call, and how many of these were between steps."""
        now = perf_counter()
        elapsed, waited = now - self._last, self._waited
        self._last, self._waited = now, 0.0
        return elapsed, waited


class Throughput:
    """Counts samples and items since the last line."""

    def __init__(self, state: DistState, plan: Plan) -> None:
        self._num_parts = state.data.world_size
        self._is_weight = plan.weight_fn is count_samples
        """Whether the weight of a batch is its number of samples."""
        self._counts = not self._is_weight
        self._takes_windows = bool(plan.having("takes_windows"))
        self._samples = 0
        self._items: dict[str, float] = {}

    def count(self, batch: Any) -> None:
        """Count the samples of this rank's batch, unless the weight of a batch is this count."""
        if self._counts and batch is not None:
            try:
                batches = batch if self._takes_windows else [batch]
                self._samples += sum(map(count_samples, batches))
            except BatchError:
                # `count_samples` cannot count such a batch, only the plan's weight_fn can.
                self._counts = False

    def add(self, report: Report) -> None:
        """Add the weight of a global batch to the counts."""
        if isinstance(report.weight, int | float):
            # Test for numbers, which is faster than a test for a Mapping.
            weights = {"": report.weight}
        else:
            weights = {f"/{name}": weight for name, weight in report.weight.items()}
        for name, weight in weights.items():
            self._items[name] = self._items.get(name, 0.0) + float(weight)

    def per_second(self, seconds: float) -> dict[str, float]:
        """Return samples and items per second, and reset the counts."""
        found = {}
        if self._is_weight:
            found["samples_per_second"] = self._items[""] / seconds
        else:
            if self._counts:
                found["samples_per_second"] = self._samples * self._num_parts / seconds
            for name, items in self._items.items():
                found[f"items_per_second{name}"] = items / seconds
        self._samples, self._items = 0, {}
        return found


class Memory:
    """The peak memory in bytes: of the device, or of the process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read_at = -math.inf
        self._known: dict[str, int] = {}

    def peak(self) -> dict[str, int]:
        """Return the peak, read at most a second ago: reading the memory costs as much as writing a line."""
        now = perf_counter()
        if now - self._read_at > _MEMORY_S:
            self._read_at = now
            if self._device.type == "cpu":
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                self._known = {"peak_memory": peak if sys.platform == "darwin" else peak * 1024}
            else:
                with suppress(RuntimeError):
                    # Some devices do not count their memory.
                    peak = torch.accelerator.max_memory_allocated(self._device)
                    self._known = {"peak_memory": peak}
        return self._known


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
