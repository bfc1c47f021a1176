"""schedule: the learning rate moves once for every update that is made."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from accel_fn._echo import Echo
from accel_fn._errors import ArgumentError, ArgumentTypeError, PlanError, message
from accel_fn._plan import AfterFn, Kept, Plan, Report, Transform
from accel_fn._state import DistState

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
        metric: for `ReduceLROnPlateau`, `report -> number`; default: the loss of the batch. On
            an accelerator it is heard of one update late, so that nothing waits for it.

    Returns:
        A transform.

    Raises:
        TypeError: it is neither a scheduler nor a function.
        ValueError: a scheduler over another optimizer than the plan's; a function that gives
            no finite number; a `metric` for a scheduler that takes none.

    Cost: the scheduler's own, on the host. No host synchronisation with a fused optimizer, also
    where updates may be skipped: the learning rate is then a tensor on the device, chosen there
    between that of an update made and that of one skipped. (Only what a scheduler moves beside the
    learning rate, as OneCycleLR does with momentum, then hears of a skip one update late.)

    >>> import accel_fn as af
    >>> af.schedule(lambda num_updates: 0.5**num_updates)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=num_samples, after=[scheduled(<lambda>)])
    """
    given = scheduler_or_fn
    is_scheduler = isinstance(given, LRScheduler)
    if not is_scheduler and not callable(given):
        rule = "be a learning-rate scheduler or a function num_updates -> multiplier"
        raise ArgumentTypeError(message("schedule", "scheduler_or_fn", rule, given))
    if metric is not None and not isinstance(given, ReduceLROnPlateau):
        rule = "be given for ReduceLROnPlateau alone"
        raise ArgumentError(message("schedule", "metric", rule, type(given).__name__))

    def schedule_plan(plan: Plan) -> Plan:
        if is_scheduler and given.optimizer is not plan.optimizer:
            raise PlanError(
                f"schedule: scheduler_or_fn must be over the plan's optimizer, got a "
                f"{type(given).__name__} over another {type(given.optimizer).__name__}"
            )
        return replace(plan, after=(*plan.after, Kept(scheduled, given, metric)))

    return schedule_plan
