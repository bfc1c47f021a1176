"""Schedulers, and plans that have them on the host or on the device."""

from dataclasses import replace

import torch
from torch.optim import lr_scheduler as schedulers

import accel_fn as af
from accel_fn.transforms.schedule.advance import Advance, AdvanceByMetric, DeviceSchedule
from tests.support import strategies as ours
from tests.support.late_reads import LateRead

SCHEDULERS = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda n: 1 / (n + 1)),
    "steps": lambda o: schedulers.MultiStepLR(o, [1, 3], gamma=0.5),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, T_max=4),
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 2), schedulers.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.5)], [2]
    ),
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=0.05, fused=True)


def scheduled(state, parts, skipped, recipe, optimizer):
    """Train the same plan on this rank's part of each batch, with some updates skipped."""
    model = ours.regression_model()
    optimizer = optimizer(model.parameters())
    plan = af.Plan(ours.mse, model, optimizer)
    state, step = af.build(af.compose(af.wrap_ddp(), recipe(optimizer))(plan), state)
    rates = []
    for index, (inputs, targets) in enumerate(parts):
        rate = float(optimizer.param_groups[0]["lr"])
        bad = float("nan") if index in skipped and state.is_main else 1.0
        state, report = step(state, (inputs * bad, targets))
        assert bool(report.applied) == (index not in skipped)
        rates += [rate] if report.applied else []
    return rates, model.state_dict()


def exponential(optimizer):
    return schedulers.ExponentialLR(optimizer, 0.5)


class Greedy:
    """A scheduler by a metric whose class is none of torch's: it halves the rate of a loss that rises."""

    def __init__(self, optimizer):
        self.optimizer, self.best = optimizer, float("inf")

    def step(self, metrics):
        if metrics > self.best:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5
        self.best = min(self.best, metrics)

    def get_last_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = state["best"]


def plateau(optimizer):
    return schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.1)


def late(advance):
    """Read results one step late, as `schedule` does on an accelerator."""

    def begin(state, plan):
        return DeviceSchedule.in_plan(plan, advance, state.device, LateRead())

    return lambda plan: replace(plan, after_update=(*plan.after_update, af.extend.Stateful(begin)))


def by_host(make_scheduler, optimizer):
    return af.schedule(make_scheduler(optimizer))


def by_device(make_scheduler, optimizer):
    return late(Advance(make_scheduler(optimizer)))


def fused_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def by_device_and_metric(scheduler, metric):
    return late(AdvanceByMetric(scheduler, metric))
