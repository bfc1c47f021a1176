"""Learning-rate schedules advance after updates or after batches, on the host or on the device."""

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
from accel_fn.transforms.schedule.rival_check import LOOKS, rival_check

MetricFn = Callable[[Report], Tensor | float]


class Advance:
    """Rule by which a scheduler advances after an update that was made."""

    def __init__(self, scheduler: Any, *, is_main: bool = True) -> None:
        self.scheduler = scheduler
        self.rival = rival_check(scheduler, is_main=is_main)

    def __call__(self) -> None:
        rival = self.rival
        if rival.is_due:
            rival.look()
        # The scheduler warns unless the optimizer's step was called, as a compiled step does not.
        self.scheduler.optimizer._opt_called = True
        self.scheduler.step()
        rival.num_advances += 1
        if rival.num_advances in LOOKS:
            rival.begin()

    def note(self, state: DistState, report: Report) -> None:
        """Look at a step's report, before the scheduler advances by it."""

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
    """Advances by a metric of the run.

    The metric is that of the applied update, or, on an accelerator, of the one before it.
    """

    def __init__(
        self, scheduler: ReduceLROnPlateau, metric: MetricFn, *, is_main: bool = True
    ) -> None:
        super().__init__(scheduler, is_main=is_main)
        self._metric = metric
        self._delayed = DelayedRead()
        self._newest: float | None = None
        """Metric of the update that was made last, if the scheduler has not advanced by it yet."""

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
        """Keep the metric, if its update was made."""
        if known is not None and known[1]:
            self._newest = known[0].item()


class Schedule:
    """Advances a scheduler after every update that was made, as the host sees them."""

    def __init__(self, advance: Advance, *, always: bool) -> None:
        self._advance = advance
        self._always = always
        """Whether every update is made."""

    @property
    def scheduler(self) -> Any:
        """The scheduler: torch's, or another library's."""
        return self._advance.scheduler

    def __call__(self, state: DistState, report: Report) -> DistState:
        self._advance.note(state, report)
        if self._always or verdict_of(report):
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
        """Let the optimizer hold its rates as numbers, which a scheduler may change meanwhile."""
        yield

    def signature(self) -> str:
        """Return the text that a checkpoint compares: the class of the scheduler, not the call."""
        return f"schedule({type(self.scheduler).__name__})"


class BatchSchedule(Schedule):
    """Advances a scheduler after every `every` batches of the run, also after skipped updates."""

    def __init__(self, advance: Advance, *, every: int, step: int) -> None:
        super().__init__(advance, always=True)
        self._every = every
        self._step = step
        """Batches consumed at the last call: several updates of one batch advance it once."""

    def __call__(self, state: DistState, report: Report) -> DistState:
        self._advance.note(state, report)
        self.before_step(state)
        return state

    def before_step(self, state: DistState, batch: Any = None) -> None:
        """Advance by the batches consumed since the last call; steps of other plans may have counted them."""
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
    """Sets the rates that a function of the state gives for the next update."""

    def __init__(self, advance: Advance, seen: list[DistState]) -> None:
        super().__init__(advance, always=True)
        self._seen = seen
        """A list of one state, which the function is given."""

    def __call__(self, state: DistState, report: Report) -> DistState:
        self.before_step(state)
        return state

    def before_step(self, state: DistState, batch: Any = None) -> None:
        """Set the rates for a step from this state, which steps of other plans may have moved."""
        if state is not self._seen[0]:
            self._seen[0] = state
            self._advance()

    def see(self, state: DistState) -> None:
        """Take this state as the newest one, without an advance."""
        self._seen[0] = state

    def signature(self) -> str:
        """Return the text that a checkpoint compares: the scheduler's class and its argument."""
        return f"schedule({type(self.scheduler).__name__} of the state)"


class Schedules:
    """Schedules of several optimizers, one each."""

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
        """Continue from the saved state."""
        for name, each in self.schedules.items():
            each.load_state_dict(saved[name])

    def signature(self) -> str:
        """Return the text that a checkpoint compares."""
        (kind, *_) = dict.fromkeys(each.signature() for each in self.schedules.values())
        return kind if self._name is None else f"{kind} of {self._name}"


class BatchSchedules(Schedules):
    """Schedules of several optimizers that count batches."""

    schedules: Mapping[str, BatchSchedule]

    def before_step(self, state: DistState, batch: Any = None) -> None:
        """Advance by the batches consumed since the last call."""
        for each in self.schedules.values():
            each.before_step(state)


class StateSchedules(Schedules):
    """Schedules of several optimizers that follow the state."""

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
        """Rates, if every update that the host has not read yet was made."""
        self.before = self.advanced
        """Rates before the newest update."""
        self._held = [torch.tensor(rate, device=device) for rate in self.advanced]
        self._show(self._held)

    def show_numbers(self) -> None:
        """Show a scheduler the rates as numbers, not as tensors on the device."""
        self._show(self.advanced)

    def advance(self, advance: Callable[[], None], applied: Tensor) -> None:
        """Advance a scheduler on the host; the device takes the new rates if the update is applied."""
        self.show_numbers()
        advance()
        self.advanced = self._shown()
        for held, rate, before in zip(self._held, self.advanced, self.before, strict=True):
            held.copy_(torch.where(applied, rate, before))
        self._show(self._held)

    def begin(self) -> None:
        """Begin an update; the user may have set the rates, or loaded the optimizer, since the last one."""
        groups = zip(self._groups(), self._held, self.advanced, strict=True)
        self.advanced = [
            rate if group["lr"] is held else float(group["lr"]) for group, held, rate in groups
        ]
        self.before = self.advanced

    def load(self, saved: Sequence[float] | None) -> None:
        """Set the saved rates; without any, or with those of other groups, keep the optimizer's."""
        if saved is None or len(saved) != len(self._held):
            self.begin()
        else:
            self.advanced = list(saved)
        for held, rate in zip(self._held, self.advanced, strict=True):
            held.fill_(rate)
        self._show(self._held)

    def _groups(self) -> list[dict[str, Any]]:
        """Return the groups, which are new objects after the optimizer was loaded."""
        return self.optimizer.param_groups

    def _shown(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups()]

    def _show(self, rates: Sequence[float | Tensor]) -> None:
        for group, rate in zip(self._groups(), rates, strict=True):
            group["lr"] = rate


class DeviceSchedule(Schedule):
    """Advances a scheduler where only the device knows yet whether the update was made.

    The learning rate is a tensor there: that of an update made, or that of one skipped. If the
    host advanced for a skipped update, it undoes that when it reads the result, one update later.
    A count of updates would not be enough: schedulers have a state, and no step back.
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
        """Return the next schedule of an optimizer in a plan."""
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
        self.rates.advance(self._advance, report.applied)
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
        """Let the optimizer hold the rates as the host knows them; give it the new ones as tensors."""
        self.rates.show_numbers()
        yield
        self.rates.load(None)

    def _undo_skipped(self, applied: Tensor | None) -> None:
        """Undo the newest advance, if its update was skipped."""
        if applied is not None and self._before is not None and not applied:
            self._advance.put_back(self._before)
            if self._is_first:
                self.rates.advanced = self.rates.before
        self._before = None


def schedules_made(plan: Plan) -> Iterator[Schedule]:
    """Yield the schedules of a plan, as far as it is built."""
    for entry in plan.after_update:
        yield from by_optimizer(entry).values()


def by_optimizer(entry: object) -> Mapping[str, Schedule]:
    """Return a slot function's schedules by name of optimizer, "" for the only one; else none."""
    if isinstance(entry, Schedules):
        return entry.schedules
    return {"": entry} if isinstance(entry, Schedule) else {}
