"""Averages of parameters by hand, and runs that average."""

import pytest
import torch
from torch.optim import swa_utils

import accel_fn as af
from tests.support import strategies as ours

BATCH = (torch.ones(4, 3).double(), torch.zeros(4, 1).double())


def mean_so_far(averaged, current, num_averaged):
    """`swa_utils.get_swa_multi_avg_fn` with an exact weight; torch rounds it to float32."""
    torch._foreach_lerp_(averaged, current, 1 / (int(num_averaged) + 1))


def growing(num_updates):
    return min(0.9, (1 + num_updates) / (4 + num_updates))


def growing_mean(averaged, current, num_averaged):
    torch._foreach_lerp_(averaged, current, 1 - growing(int(num_averaged)))


RULES = {
    "a function of the count": (af.ema(growing), growing_mean),
    "exponential": (af.ema(0.9), swa_utils.get_ema_multi_avg_fn(0.9)),
    "uniform": (af.swa(), mean_so_far),
}

each_rule = pytest.mark.parametrize(("recipe", "theirs"), RULES.values(), ids=RULES)


def means(step):
    """Copy the parameters that `use_average` shows."""
    with af.averaged(step):
        return {name: value.clone() for name, value in step.plan.model.state_dict().items()}


def by_hand(batches, theirs, num_warmup=0):
    """Train a plain loop with torch's averaged model."""
    model = ours.regression_model()
    optimizer = ours.adamw(model.parameters())
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=theirs)
    for index, batch in enumerate(batches):
        ours.mse(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if index < num_warmup:  # the averaged model has seen no update yet
            averaged = swa_utils.AveragedModel(model, multi_avg_fn=theirs)
        else:
            averaged.update_parameters(model)
    return dict(averaged.module.state_dict())


def make(recipe, state=None, model=None):
    model = model or ours.regression_model()
    return af.build(
        recipe(af.Plan(ours.mse, model, ours.adamw(model.parameters()))), state or af.DistState()
    )
