"""What DeepSpeed's engine does in a loop by hand, as its guides show it."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from tests.contrib.deepspeed.engine.cases import batches, distance, whole
from tests.contrib.deepspeed.engine.nvme import wide


def cases(folder):
    return {
        "uneven by hand": uneven,
        "clipped by hand": clipped,
        "window by hand": window,
        "nvme by hand": partial(files, folder=folder),
    }


def engine_of(model, lr=0.1, **config):
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": 1},
            **config,
        },
    )
    return engine


def gradients(first, second, **config):
    """The gradient of 15 samples, and that by which two ranks with these rows of them update."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(15, 4, generator=generator)
    targets = inputs.sum(dim=1, keepdim=True) ** 2
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    F.mse_loss(model(inputs), targets).backward()
    alone, before = model.weight.grad, model.weight.detach().clone()
    model.zero_grad()
    engine = engine_of(model, lr=1.0, **config)
    rows = (first, second)[torch.distributed.get_rank()]
    engine.backward(F.mse_loss(engine(inputs[rows]), targets[rows]))
    engine.step()
    return alone, before - model.weight.detach()


def uneven(state):
    """How far a gradient is off if ranks hold 9 and 6 samples."""
    alone, found = gradients(slice(9), slice(9, None), gradient_clipping=0.0)
    return ((found - alone).norm() / alone.norm()).item()


def clipped(state):
    """The norms of a gradient and of the update, without a bound in the configuration."""
    every = slice(None)
    return [each.norm().item() for each in gradients(every, every)]


def window(state):
    """The number of updates of two epochs of three micro-batches, two of which are one update."""
    engine = engine_of(nn.Linear(4, 1), gradient_accumulation_steps=2)
    found = []
    for _ in range(2):
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
        found.append(engine.global_steps)
    return found


def files(state, *, folder):
    """How far two trainings are apart: one keeps the optimizer's state in files."""
    device = {"device": "nvme", "nvme_path": str(folder / "by hand")}
    ends = []
    for offload in ({}, {"offload_optimizer": device}):
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **offload}
        model = wide()
        engine = engine_of(model, zero_optimization=zero, gradient_clipping=0.0)
        for x, y, _ in batches(4):
            engine.backward(F.mse_loss(engine(x), y))
            engine.step()
        ends.append(whole(model))
    return distance(*ends)
