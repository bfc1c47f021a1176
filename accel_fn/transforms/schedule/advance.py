"""Advance learning-rate schedules after updates or after batches, on the host or on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accel_fn.core.delayed_read import DelayedRead
from accel_fn.core.plan import Plan
from accel_fn.core.report import Report, verdict_of
from accel_fn.core.state import DistState
from accel_fn.core.warn import warn_user
from accel_fn.transforms.schedule.rival_check import LOOKS, rival_check

_MANY_ZERO = 3
MetricFn = Callable[[Report], Tensor | float]


class Advance:
    """Advances a scheduler, and warns if its learning rate stays at 0."""

    def __init__(self, scheduler: Any, *, is_main: bool = True) -> None:
        self.scheduler = scheduler
        self.rival = rival_check(scheduler, is_main=is_main)
        self._watches = is_main
        """Whether to warn about a rate that stays at 0."""
        self._num_zero: int | None = None
        """The number of updates in a row with a rate of 0; None before the first rate above 0."""

    def watch(self) -> None:
        """Warn once if rates above 0 are followed by three updates with rate 0 in all groups."""
        if not self._watches:
            return
        for group in self.scheduler.optimizer.param_groups:
            rate = group["lr"]
            # Do not read a rate on the device: the host would wait for the value.
            if (isinstance(rate, Tensor) and not rate.is_cpu) or rate != 0:
                self._num_zero = 0
                return
        if self._num_zero is None:
            # Do not count updates before the first rate above 0: a warm-up begins at 0.
            return
        self._num_zero += 1
        if self._num_zero == _MANY_ZERO:
            self._watches = False
            warn_user(
                "schedule: learning rate should be above 0 while a run trains, got 0 in all groups for "
                f"{_MANY_ZERO} updates in a row after rates above 0; count the length of a schedule in "
                "updates, len(loader) * num_epochs, on any number of ranks and micro-batches"
            )

    def watched(self) -> None:
        """Check the rates of the newest update by `watch`, then advance."""
        self.watch()
        self()

    def __call__(self) -> None:
        rival = self.rival
        if rival.is_due:
            rival.look()
        # Set torch's flag: without it, the scheduler would warn that the optimizer's `step` was not
        # called, as in a compiled step.
        self.scheduler.optimizer._opt_called = True
        self.scheduler.step()
        rival.num_advances += 1
        if rival.num_advances in LOOKS:
            rival.begin()

    def note(self, state: DistState, report: Report) -> None:
        """Read values for the next advance from a step's report; by default, do nothing."""

    def kept(self) -> dict[str, Any]:
        """Return everything that an advance changes."""
        return {"scheduler": self.scheduler.state_dict()}

    def put_back(self, kept: Mapping[str, Any]) -> None:
        """Restore what `kept` returned."""
        self.scheduler.load_state_dict(kept["scheduler"])
        self.rival.is_due = False

    def flush(self) -> None:
        """Read values that are still on the device."""


class AdvanceByMetric(Advance):
    """Advances a scheduler by a metric of the run.

    It uses the metric of the applied update or, on an accelerator, of the update before it.
    """

    def __init__(
        self, scheduler: ReduceLROnPlateau, metric: MetricFn, *, is_main: bool = True
    ) -> None:
        super().__init__(scheduler, is_main=is_main)
        self._metric = metric
        self._delayed = DelayedRead()
        self._newest: float | None = None
        """The metric of the last applied update; None if the scheduler has used it."""

    def __call__(self) -> None:
        if self._newest is not None:
            rival = self.rival
            if rival.is_due:
                rival.look()
            self.scheduler.step(self._newest)
            self._newest = None
            rival.num_advances += 1
            if rival.num_advances in LOOKS:
                rival.begin()

    def note(self, state: DistState, report: Report) -> None:
        """Read a metric from a step's report, at once or one step later."""
        assert report.applied is not None
        dtype = torch.float64 if state.device.type == "cpu" else torch.float32
        metric = self._metric(report)
        if not isinstance(metric, Tensor):
            metric = torch.full((), metric, dtype=dtype, device=state.device)
        metric = metric.to(state.device, dtype)
        self._take(self._delayed(torch.stack([metric, report.applied.to(dtype)])))

    def kept(self) -> dict[str, Any]:
        """Return everything that an advance changes."""
        return {**super().kept(), "metric": self._newest}

    def put_back(self, kept: Mapping[str, Any]) -> None:
        """Restore what `kept` returned."""
        super().put_back(kept)
        self._newest = kept.get("metric")

    def flush(self) -> None:
        """Read values that are still on the device."""
        self._take(self._delayed.last())

    def _take(self, known: Tensor | None) -> None:
        """Keep a metric whose value the host knows now, if the update of this metric was applied."""
        if known is not None and known[1]:
            self._newest = known[0].item()


class Schedule:
    """Advances a scheduler after every applied update.

    If updates may be skipped, the host waits until it knows whether an update was applied.
    """

    def __init__(self, advance: Advance, *, always: bool) -> None:
        self._advance = advance
        self._always = always
        """Whether every update is applied."""

    @property
    def scheduler(self) -> Any:
        """Return the scheduler, of torch or of another library."""
        return self._advance.scheduler

    def __call__(self, state: DistState, report: Report) -> DistState:
        self._advance.note(state, report)
        if self._always or verdict_of(report):
            self._advance.watch()
            self._advance()
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the state that checkpoints hold."""
        self._advance.flush()
        return self._advance.kept()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._advance.flush()
        self._advance.put_back(saved)

    @contextmanager
    def rates_as_numbers(self) -> Iterator[None]:
        """Enter a context in which learning rates are numbers. In this class, they always are."""
        yield

    def signature(self) -> str:
        """Return the text that a checkpoint compares: the class of the scheduler, not the call."""
        return f"schedule({type(self.scheduler).__name__})"


class BatchSchedule(Schedule):
    """Advances a scheduler after every `every` batches of the run, skipped updates included."""

    def __init__(self, advance: Advance, *, every: int, step: int) -> None:
        super().__init__(advance, always=True)
        self._every = every
        self._step = step
        """Batches consumed at the last call: several updates with one batch advance only once."""

    def __call__(self, state: DistState, report: Report) -> DistState:
        self._advance.note(state, report)
        self._advance.watch()
        self.before_step(state)
        return state

    def before_step(self, state: DistState, batch: Any = None) -> None:
        """Advance for the batches consumed since the last call, also by steps of other plans."""
        for _ in range(state.step // self._every - self._step // self._every):
            self._advance()
        self._step = state.step

    def state_dict(self) -> dict[str, Any]:
        """Return the state that checkpoints hold."""
        return {**super().state_dict(), "step": self._step}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        super().load_state_dict(saved)
        self._step = saved["step"]

    def signature(self) -> str:
        """Return the text that a checkpoint compares: the scheduler's class and its interval."""
        return f"schedule({type(self.scheduler).__name__}, every={self._every})"


class StateSchedule(Schedule):
    """Sets the rates of the next update by a function of the state."""

    def __init__(self, advance: Advance, seen: list[DistState]) -> None:
        super().__init__(advance, always=True)
        self._seen = seen
        """A list with one state, which the function reads."""

    def __call__(self, state: DistState, report: Report) -> DistState:
        self._advance.watch()
        self.before_step(state)
        return state

    def before_step(self, state: DistState, batch: Any = None) -> None:
        """Set the rates for a step from this state, which other plans' steps may have advanced."""
        if state is not self._seen[0]:
            self._seen[0] = state
            self._advance()

    def see(self, state: DistState) -> None:
        """Store this state as the newest one, without an advance of the schedule."""
        self._seen[0] = state

    def signature(self) -> str:
        """Return the text that a checkpoint compares: the scheduler's class, and that it reads the state."""
        return f"schedule({type(self.scheduler).__name__} of the state)"


class Schedules:
    """One schedule for each of several optimizers."""

    def __init__(self, schedules: Mapping[str, Schedule], name: str | None) -> None:
        self.schedules = schedules
        self._name = name
        """The name of the optimizer, if the user gave it."""

    def __call__(self, state: DistState, report: Report) -> DistState:
        for each in self.schedules.values():
            state = each(state, report)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the state that checkpoints hold, by optimizer."""
        return {name: each.state_dict() for name, each in self.schedules.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        for name, each in self.schedules.items():
            each.load_state_dict(saved[name])

    def signature(self) -> str:
        """Return the text that a checkpoint compares."""
        (kind, *_) = dict.fromkeys(each.signature() for each in self.schedules.values())
        return kind if self._name is None else f"{kind} of {self._name}"


class BatchSchedules(Schedules):
    """One `BatchSchedule` for each of several optimizers."""

    schedules: Mapping[str, BatchSchedule]

    def before_step(self, state: DistState, batch: Any = None) -> None:
        """Advance by the batches consumed since the last call."""
        for each in self.schedules.values():
            each.before_step(state)


class StateSchedules(Schedules):
    """One `StateSchedule` for each of several optimizers."""

    schedules: Mapping[str, StateSchedule]

    def before_step(self, state: DistState, batch: Any = None) -> None:
        """Set the rates for a step from this state."""
        for each in self.schedules.values():
            each.before_step(state)


class Rates:
    """Learning rates of an optimizer's groups, as tensors on the device.

    All schedules of an optimizer in a plan share this object, and advance one after another.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.advanced = self._shown()
        """The newest rates as numbers. They assume that an update was applied if the host does not
        know this yet."""
        self.before = self.advanced
        """The rates before the newest update."""
        self._held = [torch.tensor(rate, device=device) for rate in self.advanced]
        self._show(self._held)

    def show_numbers(self) -> None:
        """Put the rates into the optimizer as numbers, for a scheduler to read."""
        self._show(self.advanced)

    def advance(self, advance: Callable[[], None], applied: Tensor) -> None:
        """Advance a scheduler on the host; the device takes the new rates if `applied` is True."""
        self.show_numbers()
        advance()
        self.advanced = self._shown()
        for held, rate, before in zip(self._held, self.advanced, self.before, strict=True):
            held.copy_(torch.where(applied, rate, before))
        self._show(self._held)

    def begin(self) -> None:
        """Begin an update: take rates that the user has set or loaded since the last update."""
        groups = zip(self._groups(), self._held, self.advanced, strict=True)
        self.advanced = [
            rate if group["lr"] is held else float(group["lr"]) for group, held, rate in groups
        ]
        self.before = self.advanced

    def load(self, saved: Sequence[float] | None) -> None:
        """Set the saved rates; keep the optimizer's rates if none were saved, or another number of rates."""
        if saved is None or len(saved) != len(self._held):
            self.begin()
        else:
            self.advanced = list(saved)
        for held, rate in zip(self._held, self.advanced, strict=True):
            held.fill_(rate)
        self._show(self._held)

    def _groups(self) -> list[dict[str, Any]]:
        """Return the current groups: `load_state_dict` of an optimizer replaces the groups by new objects."""
        return self.optimizer.param_groups

    def _shown(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups()]

    def _show(self, rates: Sequence[float | Tensor]) -> None:
        for group, rate in zip(self._groups(), rates, strict=True):
            group["lr"] = rate


class DeviceSchedule(Schedule):
    """Advances a scheduler before the host knows whether the device has applied the update.

    The learning rate is a tensor on the device, which chooses the rate for an applied or a skipped
    update. If the host has advanced for a skipped update, it restores the scheduler's former state
    when it reads the verdict, one update later. Counting updates would not be enough: schedulers
    have a state, and cannot go back.
    """

    def __init__(
        self, advance: Advance, rates: Rates, delayed: DelayedRead, *, is_first: bool
    ) -> None:
        super().__init__(advance, always=False)
        self.rates = rates
        self._delayed = delayed
        self._is_first = is_first
        """Whether this is the first schedule of its optimizer in the plan."""
        self._before: dict[str, Any] | None = None
        """The state of the scheduler before its newest advance."""

    @classmethod
    def in_plan(
        cls, plan: Plan, advance: Advance, device: torch.device, delayed: DelayedRead
    ) -> DeviceSchedule:
        """Make a schedule that shares its rates with earlier schedules of the same optimizer in the plan."""
        optimizer = advance.scheduler.optimizer
        made = [each for each in schedules_made(plan) if isinstance(each, cls)]
        earlier = [each for each in made if each.rates.optimizer is optimizer]
        rates = earlier[0].rates if earlier else Rates(optimizer, device)
        return cls(advance, rates, delayed, is_first=not earlier)

    def __call__(self, state: DistState, report: Report) -> DistState:
        assert report.applied is not None
        self._undo_skipped(self._delayed(report.applied))
        self._advance.note(state, report)
        self._before = copy.deepcopy(self._advance.kept())
        if self._is_first:
            self.rates.begin()
        self.rates.advance(self._advance.watched, report.applied)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the state that checkpoints hold."""
        self._undo_skipped(self._delayed.last())
        return {**super().state_dict(), "rates": self.rates.advanced}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._undo_skipped(self._delayed.last())
        super().load_state_dict(saved)
        self.rates.load(saved.get("rates"))

    @contextmanager
    def rates_as_numbers(self) -> Iterator[None]:
        """Keep the rates as numbers in this context; put them on the device at its end."""
        self.rates.show_numbers()
        yield
        self.rates.load(None)

    def _undo_skipped(self, applied: Tensor | None) -> None:
        """Undo the last advance of the schedule if the update before this advance was skipped."""
        if applied is not None and self._before is not None and not applied:
            self._advance.put_back(self._before)
            if self._is_first:
                self.rates.advanced = self.rates.before
        self._before = None


def schedules_made(plan: Plan) -> Iterator[Schedule]:
    """Yield the schedules of a plan that are built so far."""
    for entry in plan.after_update:
        yield from by_optimizer(entry).values()


def by_optimizer(entry: object) -> Mapping[str, Schedule]:
    """Return a slot function's schedules by optimizer name ("" for a single one); {} if it has none."""
    if isinstance(entry, Schedules):
        return entry.schedules
    return {"": entry} if isinstance(entry, Schedule) else {}
