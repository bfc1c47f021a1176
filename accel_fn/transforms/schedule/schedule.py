"""schedule: change the learning rate after applied updates, or after batches or epochs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeGuard, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from accel_fn.core.delayed_read import DelayedRead
from accel_fn.core.plan import Plan, Stateful, UpdateFn, trained_by
from accel_fn.core.state import DistState
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.core.update import takes_factor
from accel_fn.data.loader import ShardedLoader
from accel_fn.errors import ArgumentError, ArgumentTypeError, PlanError, check_count, message
from accel_fn.transforms.schedule.advance import (
    Advance,
    AdvanceByMetric,
    BatchSchedule,
    BatchSchedules,
    DeviceSchedule,
    MetricFn,
    Schedule,
    Schedules,
    StateSchedule,
    StateSchedules,
    schedules_made,
)

MultiplierFn = Callable[[int], float] | Callable[[DistState], float]


@transform
def schedule(
    scheduler_or_fn: LRScheduler | MultiplierFn,
    *,
    every: ShardedLoader[Any] | int | None = None,
    metric: MetricFn | None = None,
    optimizer: str | None = None,
) -> Transform:
    """Advance a learning-rate schedule once for every update that is made, or for every epoch.

    One applied update is one advance, for any number of ranks and micro-batches; a skipped one is
    none. So write a schedule in updates: `len(loader) * num_epochs` of them. With `every`, write it in
    epochs, or in so many batches.

    Law: the learning rate of an update is a function of the number of updates made before it; with
    `every`, of the number of batches consumed before it; of a function of the state, of the state that
    the step is called with.
    Tests: `tests/laws/law10_schedule.py`, `tests/laws/law10_schedule_of_batches.py`.

    Args:
        scheduler_or_fn: a scheduler of `torch.optim.lr_scheduler` or of another library, over the
            plan's optimizer: it advances in place, as the optimizer does. Or a function from the
            number of updates made so far to a finite number, which multiplies each group's initial
            learning rate. If its parameter is named `state`, the function gets the state of the run
            instead of that number, before each step: `state.items` is the number of tokens (or of
            other items that `weight_fn` counts), `state.samples` the number of rows, and
            `state.step` the number of batches, over all ranks, in the batches before this one,
            including skipped ones.
        every: a loader that `shard_loader` returned, or `group_batches` made of one: advance in the step of
            the last batch of each epoch. Or a number of batches. Batches count by `state.step`, also those
            whose update is skipped. Default: every update that is made.
        metric: for `ReduceLROnPlateau` and transformers' `GreedyLR`, `report -> number`; default:
            the loss of the batch. On an accelerator the scheduler advances by the metric of the
            previous update, so that nothing waits for it.
        optimizer: the name of one of the plan's optimizers, whose learning rates a function
            multiplies; default: those of every one.

    Returns:
        A transform.

    Raises:
        TypeError: `scheduler_or_fn` is neither a scheduler nor a function, or a function of `state`
            and more; `every` is neither a loader whose epochs have one known length nor a number.
        ValueError: a scheduler over another optimizer than the plan's, or than the named one; a
            name that no optimizer of the plan has; a function that returns no finite number; a
            `metric` for a scheduler that takes none; `every` is < 1, or combined with a function of
            the state. In `build`: a function and another schedule of the same optimizer.

    Warns:
        UserWarning: once, on the main rank: the loop steps a scheduler of the same optimizer itself; at the
            third update in a row whose rate is 0 in all groups, after one above 0.

    Cost: the scheduler's own, on the host. No host synchronisation with a fused optimizer, also if
    updates may be skipped: the learning rate is then a tensor on the device, which chooses the rate
    for an applied or a skipped update. (Other values that a scheduler changes, such as OneCycleLR's
    momentum, then follow a skip one update late.) The counts of the state are on the host, so a
    function of them never waits. With parameters on the host (`wrap_fsdp(offload=True)`) the host
    waits, as for the update itself. It also waits if an optimizer has both a schedule with `every`
    and one that counts updates.

    >>> import accel_fn as af
    >>> af.schedule(lambda num_updates: 0.5**num_updates)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, after_update=[schedule(<lambda>)])
    >>> by_tokens = af.schedule(lambda state: 1 / (1 + state.items / 1e9))
    """
    given, batches = scheduler_or_fn, _batches_of(every)
    is_scheduler = isinstance(given, LRScheduler) or takes_metric(given)
    if not is_scheduler and not callable(given):
        rule = "be a learning-rate scheduler or a function num_updates -> multiplier"
        raise ArgumentTypeError(message("schedule", "scheduler_or_fn", rule, given))
    if metric is not None and not takes_metric(given):
        rule = "be given for a scheduler that takes one, as ReduceLROnPlateau does"
        raise ArgumentError(message("schedule", "metric", rule, type(given).__name__))
    if not is_scheduler and takes_state(given) and batches is not None:
        rule, repair = "be left out beside a function of the state", "state.step counts batches"
        raise ArgumentError(message("schedule", "every", rule, batches, repair))

    def check(plan: Plan) -> None:
        if optimizer is not None and optimizer not in plan.optimizers:
            rule = f"be the name of one of the plan's, {sorted(plan.optimizers)}"
            raise PlanError(message("schedule", "optimizer", rule, optimizer))
        over: Any = getattr(given, "optimizer", None)
        if is_scheduler and not any(
            over is each for each in over_optimizers(plan, optimizer).values()
        ):
            whose = "the plan's optimizer" if optimizer is None else f"optimizer {optimizer!r}"
            raise PlanError(
                f"schedule: scheduler_or_fn must be over {whose}, got a "
                f"{type(given).__name__} over another {type(over).__name__}"
            )

    settings = {} if optimizer is None else {"optimizer": optimizer}
    slot = ScheduleSlot(scheduled, by=given, every=batches, metric=metric, **settings)
    return fill(check=check, after_update=slot)


def over_optimizers(plan: Plan, name: str | None, by: Any = None) -> Mapping[str, Optimizer]:
    """Return the optimizers of a schedule: the named one, the scheduler's own, or all of them."""
    own = getattr(by, "optimizer", None)
    return {
        each: optimizer
        for each, optimizer in plan.optimizers.items()
        if name in (None, each) and own in (None, optimizer)
    }


class ScheduleSlot(Stateful):
    """The slot function of schedule: it calls `scheduled` with its settings."""

    def validate(self, state: DistState, plan: Plan) -> None:
        """Refuse a function if the plan has a second schedule of the same optimizer."""
        slots = [each for each in plan.after_update if isinstance(each, ScheduleSlot)]
        for name in over_optimizers(plan, self.keywords.get("optimizer"), self.keywords["by"]):
            rivals = [each.keywords["by"] for each in slots if name in each.names(plan)]
            schedulers = [each for each in rivals if hasattr(each, "optimizer")]
            if len(rivals) > 1 and len(schedulers) < len(rivals):
                raise PlanError(
                    "build: schedule must stand alone in a plan where it is given a function, which sets "
                    f"the learning rate whatever another has made of it, got {len(rivals)} schedules; "
                    "give one function, the product, or name different optimizers"
                )

    def names(self, plan: Plan) -> Collection[str]:
        """Return the names of the optimizers whose learning rates the schedule changes."""
        return over_optimizers(plan, self.keywords.get("optimizer"), self.keywords["by"]).keys()


def scheduled(
    state: DistState,
    plan: Plan,
    *,
    by: LRScheduler | MultiplierFn,
    every: int | None = None,
    metric: MetricFn | None = None,
    optimizer: str | None = None,
) -> UpdateFn:
    """Make the function that advances the schedule in one step function."""
    made: dict[str, Schedule] = {}
    for name, each in over_optimizers(plan, optimizer, by).items():
        advance: Advance
        if takes_metric(by):
            metric_fn = metric or (lambda report: report.loss)
            advance = AdvanceByMetric(by, metric_fn, is_main=state.is_main)
        else:
            seen = [state]
            scheduler = by if isinstance(by, LRScheduler) else LambdaLR(each, _checked(by, seen))
            advance = Advance(scheduler, is_main=state.is_main)
            if not isinstance(by, LRScheduler) and takes_state(by):
                made[name] = StateSchedule(advance, seen)
                continue
        always = plan.always_applies(state)
        # For offloaded parameters, keep rates on the host: a kernel on the host could read a rate
        # on the device before the value has arrived.
        on_host = any(parameter.is_cpu for parameter in trained_by(each))
        waits = always or on_host or state.device.type == "cpu" or not takes_factor(each)
        if every is not None:
            made[name] = BatchSchedule(advance, every=every, step=state.step)
        elif not (waits or _counts_batches(plan, name)):
            made[name] = DeviceSchedule.in_plan(plan, advance, state.device, DelayedRead())
        else:
            made[name] = Schedule(advance, always=always)
    if len(plan.optimizers) == 1:
        return next(iter(made.values()))
    kind = Schedules if every is None else BatchSchedules
    if all(isinstance(each, StateSchedule) for each in made.values()):
        kind = StateSchedules
    return kind(made, optimizer)


def _counts_batches(plan: Plan, name: str) -> bool:
    """Return whether a schedule of the optimizer counts batches.

    A schedule that counts batches needs the rates on the host.
    """
    optimizer, made = plan.optimizers[name], schedules_made(plan)
    to_come = [each for each in plan.after_update if isinstance(each, ScheduleSlot)]
    return any(
        isinstance(each, BatchSchedule) and each.scheduler.optimizer is optimizer for each in made
    ) or any(each.keywords.get("every") and name in each.names(plan) for each in to_come)


def _batches_of(every: ShardedLoader[Any] | int | None) -> int | None:
    """Return the number of batches after which a schedule advances."""
    if every is None:
        return None
    if not isinstance(every, ShardedLoader):
        got: Any = type(every).__name__ if isinstance(every, DataLoader) else every
        repair = "for every epoch, give the loader that shard_loader returned: every=loader"
        return check_count("schedule", "every", got, repair=repair)
    facts = every.state_dict()
    # Refuse a loader with a batch sampler: each epoch may have another number of batches.
    if facts.get("num_samples") is None:
        rule, got = "have a length that all of its epochs have", type(every.loader.dataset).__name__
        repair = "give every=n, a number of batches"
        raise ArgumentTypeError(message("schedule", "every", rule, f"a loader of {got}", repair))
    return check_count("schedule", "every", facts["batches_per_epoch"] or 0)


def takes_metric(scheduler: object) -> TypeGuard[ReduceLROnPlateau]:
    """Return whether a scheduler's `step` takes a metric, as in transformers' GreedyLR."""
    if not isinstance(getattr(scheduler, "optimizer", None), Optimizer):
        return False
    step: Any = getattr(scheduler, "step", None)
    parameters = inspect.signature(step).parameters if callable(step) else {}
    return [n for n, each in parameters.items() if each.default is each.empty] == ["metrics"]


def takes_state(function: object) -> bool:
    """Return whether a function has a parameter `state`; refuse other required parameters."""
    try:
        parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        # A class that is written in C may have no signature. Call it with the number of updates.
        return False
    if "state" not in parameters:
        return False
    others = [
        name
        for name, each in parameters.items()
        if name != "state" and each.default is each.empty and each.kind < each.VAR_POSITIONAL
    ]
    if others:
        rule = "be a function of state alone where it has a parameter of that name"
        raise ArgumentTypeError(message("schedule", "scheduler_or_fn", rule, [*parameters]))
    return True


def _checked(given: MultiplierFn, seen: Sequence[DistState]) -> Callable[[int], float]:
    """Wrap the user's function as a function of `num_updates`; raise if a result is not finite."""
    # Return a closure and not an object: a checkpoint would store the attributes of an object.
    of_state, multiplier_fn = takes_state(given), cast("Callable[..., float]", given)

    def multiplier(num_updates: int) -> float:
        value = multiplier_fn(state=seen[0]) if of_state else multiplier_fn(num_updates)
        if not math.isfinite(value):
            after = f"{seen[0].step} batches" if of_state else f"{num_updates} updates"
            rule = f"give a finite number, after {after}"
            raise ArgumentError(message("schedule", "scheduler_or_fn", rule, value))
        return value

    return multiplier
