"""Runs of two lengths with schedules, by hand and with accel_fn."""

import torch
from torch.optim import lr_scheduler as schedulers

import accel_fn as af
from tests import reference
from tests.support import strategies as ours


def sequential(optimizer, n):
    warm_up = schedulers.LinearLR(optimizer, 0.25, total_iters=n // 3)
    return schedulers.SequentialLR(
        optimizer, [warm_up, schedulers.CosineAnnealingLR(optimizer, n - n // 3)], [n // 3]
    )


def chained(optimizer, n):
    return schedulers.ChainedScheduler(
        [schedulers.PolynomialLR(optimizer, n), schedulers.ExponentialLR(optimizer, 0.9)]
    )


WITH_LENGTH = {
    "one cycle": (lambda o, n: schedulers.OneCycleLR(o, 0.2, total_steps=n), "total_steps"),
    "cosine": (schedulers.CosineAnnealingLR, "T_max"),
    "linear": (lambda o, n: schedulers.LinearLR(o, 1.0, 0.1, n), "total_iters"),
    "polynomial": (schedulers.PolynomialLR, "total_iters"),
    "milestones": (lambda o, n: schedulers.MultiStepLR(o, [n // 2]), "milestones"),
    "sequential": (sequential, "_milestones"),
    "chained": (chained, r"schedulers\[0\].total_iters"),
}


def falling(n):
    return lambda num_updates: max(0.0, 1 - num_updates / n)


WRAPS = {
    "wrap_ddp": af.wrap_ddp,
    "wrap_fsdp": af.wrap_fsdp,
    "local_sgd": lambda: af.local_sgd(every=1),  # equal to one rank, as SGD is linear in gradients
}

SHORT, LONG = 9, 15


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batches_of(bad=()):
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(LONG - 1):
        inputs = torch.randn(6, 3, generator=generator).double()
        factor = float("nan") if number in bad else 1.0
        found.append((inputs * factor, inputs.sum(dim=1, keepdim=True)))
    return found


class ByHand:
    """The loop by hand, with a scheduler that is replaced at some update."""

    def __init__(self, make, optimizer=sgd):
        self.make = make
        self.model = ours.regression_model()
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = self.begin(self.optimizer, SHORT)
        self.num_updates = 0
        self.rates = []

    def begin(self, optimizer, length):
        made = self.make(optimizer, length)
        return schedulers.LambdaLR(optimizer, made) if callable(made) else made

    def lengthen(self):
        """Take the rates and the momentum that a new program would have after as many updates."""
        other = type(self.optimizer)([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        if "momentum" in other.param_groups[0]:
            other.param_groups[0]["momentum"] = 0.9
        scheduler = self.begin(other, LONG)
        for _ in range(self.num_updates):
            other.step()
            scheduler.step()
        scheduler.optimizer = self.optimizer
        for part in getattr(scheduler, "_schedulers", ()):
            part.optimizer = self.optimizer
        settings = {k: v for k, v in other.param_groups[0].items() if k != "params"}
        self.optimizer.param_groups[0].update(settings)
        self.scheduler = scheduler

    def train(self, batches):
        for batch in batches:
            if batch[0].isfinite().all():
                self.rates.append(float(self.optimizer.param_groups[0]["lr"]))
                reference.train(self.model, ours.mse, self.optimizer, [batch])
                self.scheduler.step()
                self.num_updates += 1


def built(state, make, wrap, k, length, optimizer=sgd):
    model = ours.regression_model()
    optimizer = optimizer(model.parameters())
    skip = af.skip_nonfinite() if wrap != "local_sgd" else af.compose()
    recipe = af.compose(WRAPS[wrap](), af.accumulate(k), skip, af.schedule(make(optimizer, length)))
    return af.build(recipe(af.Plan(ours.mse, model, optimizer)), state)


def go_on(state, step, batches):
    rates = []
    for batch in batches:
        rate = float(step.plan.optimizer.param_groups[0]["lr"])
        state, report = step(state, af.shard_batch(batch, state))
        rates += [rate] if report.applied else []
    return state, rates


def parameters_of(step):
    return {name: each.clone() for name, each in ours.whole(step.plan.model.state_dict()).items()}
