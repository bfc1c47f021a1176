"""schedule: the learning rate moves once for every update that is made."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from accel_fn._echo import Echo
from accel_fn._errors import ArgumentError, ArgumentTypeError, PlanError, message
from accel_fn._plan import AfterFn, Asked, Kept, Plan, Report, Transform
from accel_fn._state import DistState
from accel_fn._updating import takes_factor

MultiplierFn = Callable[[int], float]
MetricFn = Callable[[Report], "Tensor | float"]


def schedule(
    scheduler_or_fn: LRScheduler | MultiplierFn, *, metric: MetricFn | None = None
) -> Transform:
    """Advance a learning-rate schedule once for every update that is made.

    Whatever the number of ranks and micro-batches, one update is one advance; one that is
    skipped is none. So a schedule is written in updates: `len(loader) * num_epochs` of them.

    Law: the learning rate of an update is a function of the number of updates made before it.

    Args:
        scheduler_or_fn: any of `torch.optim.lr_scheduler`'s, or another library's, over the
            plan's optimizer: it advances in place, as the optimizer does. Or a function from
            the number of updates made so far to a finite number, which is what the learning
            rate that each group had is multiplied by.
        metric: for `ReduceLROnPlateau` and transformers' `GreedyLR`, `report -> number`; default:
            the loss of the batch. On an accelerator it is heard of one update late, so that
            nothing waits for it.

    Returns:
        A transform.

    Raises:
        TypeError: it is neither a scheduler nor a function.
        ValueError: a scheduler over another optimizer than the plan's; a function that gives
            no finite number; a `metric` for a scheduler that takes none. In `build`: a function
            beside another schedule.

    Cost: the scheduler's own, on the host. No host synchronisation with a fused optimizer, also
    where updates may be skipped: the learning rate is then a tensor on the device, chosen there
    between that of an update made and that of one skipped. (Only what a scheduler moves beside the
    learning rate, as OneCycleLR does with momentum, then hears of a skip one update late.)

    >>> import accel_fn as af
    >>> af.schedule(lambda num_updates: 0.5**num_updates)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=num_samples, after=[scheduled(by=<lambda>)])
    """
    given = scheduler_or_fn
    is_scheduler = isinstance(given, LRScheduler) or heeds_metric(given)
    if not is_scheduler and not callable(given):
        rule = "be a learning-rate scheduler or a function num_updates -> multiplier"
        raise ArgumentTypeError(message("schedule", "scheduler_or_fn", rule, given))
    if metric is not None and not heeds_metric(given):
        rule = "be given for a scheduler that heeds one, as ReduceLROnPlateau does"
        raise ArgumentError(message("schedule", "metric", rule, type(given).__name__))

    def schedule_plan(plan: Plan) -> Plan:
        over: Any = getattr(given, "optimizer", None)
        if is_scheduler and over is not plan.optimizer:
            raise PlanError(
                f"schedule: scheduler_or_fn must be over the plan's optimizer, got a "
                f"{type(given).__name__} over another {type(over).__name__}"
            )
        return replace(plan, after=(*plan.after, following))

    following = Scheduling(scheduled, by=given, **({} if metric is None else {"metric": metric}))
    return schedule_plan


class Scheduling(Kept, Asked):
    """`scheduled` with its settings."""

    def check(self, state: DistState, plan: Plan) -> None:  # noqa: ARG002
        """Refuse a function beside another schedule."""
        all_of_plan = [each.keywords["by"] for each in plan.after if isinstance(each, Scheduling)]
        schedulers = [each for each in all_of_plan if hasattr(each, "optimizer")]
        if len(all_of_plan) > 1 and len(schedulers) < len(all_of_plan):
            raise PlanError(
                "build: schedule must stand alone in a plan where it is given a function, which sets "
                f"the learning rate whatever another has made of it, got {len(all_of_plan)} schedules; "
                "give one function, the product"
            )


def scheduled(
    state: DistState, plan: Plan, *, by: LRScheduler | MultiplierFn, metric: MetricFn | None = None
) -> AfterFn:
    """What advances the schedule of one step."""
    if heeds_metric(by):
        return Plateau(by, metric or (lambda report: report.loss))
    scheduler = by if isinstance(by, LRScheduler) else LambdaLR(plan.optimizer, _checked(by))
    always = plan.updates_always(state)
    if not always and state.device.type != "cpu" and takes_factor(plan.optimizer):
        return DeviceSchedule(scheduler, state.device, Echo())
    return Schedule(scheduler, always=always)


def heeds_metric(scheduler: object) -> TypeGuard[ReduceLROnPlateau]:
    """Does its `step` take a metric? Not all that do are of torch's class: transformers' GreedyLR is none."""
    if not isinstance(getattr(scheduler, "optimizer", None), Optimizer):
        return False
    step: Any = getattr(scheduler, "step", None)
    parameters = inspect.signature(step).parameters if callable(step) else {}
    return [n for n, each in parameters.items() if each.default is each.empty] == ["metrics"]


def _checked(multiplier_fn: MultiplierFn) -> MultiplierFn:
    def multiplier(num_updates: int) -> float:
        value = multiplier_fn(num_updates)
        if not math.isfinite(value):
            rule = f"give a finite number, after {num_updates} updates"
            raise ArgumentError(message("schedule", "scheduler_or_fn", rule, value))
        return value

    return multiplier


class Schedule:
    """Advances a scheduler after every update that was made, as the host sees them."""

    def __init__(self, scheduler: LRScheduler, *, always: bool) -> None:
        self.scheduler = scheduler
        self._always = always
        """Is every update made?"""

    def __call__(self, state: DistState, report: Report) -> DistState:
        if self._always or report.applied:
            self._advance()
        return state

    def _advance(self) -> None:
        # The scheduler warns unless the optimizer's step was called, as a compiled step does not.
        self.scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """What goes into checkpoints."""
        return {"scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what was saved."""
        self.scheduler.load_state_dict(saved["scheduler"])

    def __repr__(self) -> str:
        return f"scheduled(by={type(self.scheduler).__name__})"


class Plateau(Schedule):
    """Advances a scheduler by a number that says how well the run goes."""

    def __init__(self, scheduler: ReduceLROnPlateau, metric: MetricFn) -> None:
        super().__init__(scheduler, always=False)
        self._plateau = scheduler
        self._metric = metric
        self._echo = Echo()

    def __call__(self, state: DistState, report: Report) -> DistState:
        assert report.applied is not None
        metric = torch.as_tensor(
            self._metric(report),
            dtype=torch.float64 if state.device.type == "cpu" else torch.float32,
        )
        told = torch.stack([metric.to(state.device), report.applied.to(metric.dtype)])
        self._heed(self._echo(told))
        return state

    def _heed(self, known: Tensor | None) -> None:
        if known is not None and known[1]:
            self._plateau.step(known[0].item())

    def state_dict(self) -> dict[str, Any]:
        """What goes into checkpoints."""
        self._heed(self._echo.last())
        return super().state_dict()


class DeviceSchedule(Schedule):
    """Advances a scheduler where only the device knows yet whether the update was made.

    The learning rate is a tensor there: that of an update made, or that of one skipped. What
    the host has advanced in vain is put back when it hears of it, one update later.
    """

    def __init__(self, scheduler: LRScheduler, device: torch.device, echo: Echo) -> None:
        super().__init__(scheduler, always=False)
        self._echo = echo
        self._rates = self._shown()
        """Of the groups, where every update that the host has not heard of was made."""
        self._held = [torch.tensor(rate, device=device) for rate in self._rates]
        self._before: tuple[dict[str, Any], list[float]] | None = None
        """Scheduler and rates before the newest update."""
        self._show(self._held)

    def __call__(self, state: DistState, report: Report) -> DistState:
        assert report.applied is not None
        self._hear(self._echo(report.applied))
        rates = self._rates
        self._before = copy.deepcopy(self.scheduler.state_dict()), rates
        self._show(rates)
        self._advance()
        self._rates = self._shown()
        for held, advanced, same in zip(self._held, self._rates, rates, strict=True):
            held.copy_(torch.where(report.applied, advanced, same))
        self._show(self._held)
        return state

    def state_dict(self) -> dict[str, Any]:
        """What goes into checkpoints."""
        self._hear(self._echo.last())
        return super().state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what was saved."""
        self._echo.last()
        super().load_state_dict(saved)
        self._rates = [float(rate) for rate in self.scheduler.get_last_lr()]
        for held, rate in zip(self._held, self._rates, strict=True):
            held.fill_(rate)
        self._show(self._held)

    def _hear(self, applied: Tensor | None) -> None:
        if applied is not None and self._before is not None and not applied:
            saved, self._rates = self._before
            self.scheduler.load_state_dict(saved)
        self._before = None

    def _shown(self) -> list[float]:
        return [float(group["lr"]) for group in self.scheduler.optimizer.param_groups]

    def _show(self, rates: Sequence[float | Tensor]) -> None:
        for group, rate in zip(self.scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
