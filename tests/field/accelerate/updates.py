"""Rows 8, 9, 10, 21 and 22: scalers, schedules, and state that two set-ups share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from tests.field.accelerate import fresh, linear, row, samples
from tests.support import strategies as ours


@row(8)
def one_scaler() -> str:
    grown, halved = _second_update(1.0), _second_update(math.inf)
    return f"second update x{grown:.1f} when the scale grows, x{halved:.0f} after an overflow of the first"


def _second_update(first_input: float) -> float:
    """Return the fraction of its gradient, which is one, that the second of two optimizers
    applies."""
    accelerator = _with_scaler()
    models = [linear(), linear()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    optimizers = accelerator.prepare(*optimizers)
    for model, value in zip(models, (first_input, 1.0), strict=True):
        accelerator.backward(_sum(model, value))
    for optimizer in optimizers:
        optimizer.step()
    return float((linear().weight - models[1].weight).detach().mean())


@row(9)
def fused() -> str:
    accelerator, model = _with_scaler(), linear()
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), fused=True))
    schedule = accelerator.prepare(lr_scheduler.StepLR(optimizer, 1))
    accelerator.backward(_sum(model, math.inf))
    optimizer.step()
    schedule.step()
    assert torch.equal(model.weight, linear().weight)
    assert not optimizer.step_was_skipped
    assert optimizer.param_groups[0]["lr"] < optimizer.defaults["lr"]
    return "the skipped step is not noticed: the schedule advances"


def _with_scaler() -> Accelerator:
    """Use torch's loss scaler for CPUs, since accelerate makes one only for GPUs."""
    accelerator = fresh()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    return accelerator


def _sum(model: nn.Module, value: float) -> torch.Tensor:
    return model(torch.full((1, 3), value).double()).sum()


@row(10)
def schedules() -> str:
    steps = _rates(lambda each: lr_scheduler.StepLR(each, 2, 0.5), 3)
    cosine = _rates(lambda each: lr_scheduler.CosineAnnealingLR(each, T_max=10), 10)
    assert steps == [1.0, 0.5, 0.25, 0.125]
    assert math.isclose(cosine[-1], 1.0)
    return "StepLR(2) on 2 ranks decays every update; a cosine over all updates ends where it began"


def _rates(make: Callable[[Any], Any], num_updates: int) -> list[float]:
    """Return the learning rate before each update and after the last."""
    accelerator, model = fresh(), linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped, optimizer, schedule = accelerator.prepare(model, optimizer, make(optimizer))
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(num_updates):
        accelerator.backward(ours.mse(wrapped, samples(4)[:]))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@row(21)
def two_models() -> str:
    accelerator = fresh(gradient_accumulation_steps=2)
    loader, *models = accelerator.prepare(DataLoader(samples(64), batch_size=4), linear(), linear())
    syncs = [0, 0]
    for _ in loader:
        for place, model in enumerate(models):
            with accelerator.accumulate(model):
                syncs[place] += accelerator.sync_gradients
    first, second = syncs
    return f"one shared counter: in {len(loader)} batches the first syncs {first}x, the second {second}x"


@row(22)
def second_accelerator() -> str:
    first = fresh(gradient_accumulation_steps=4)
    before = first.gradient_accumulation_steps
    Accelerator(cpu=True)
    return (
        f"resets the first one's accumulation from {before} to {first.gradient_accumulation_steps}"
    )
