"""The program of the checkpoints beside it: `python program.py FOLDER`, on a checkout, writes one more.

To keep one of a new format: check the commit out beside this clone, run this file there with its
checkout in PYTHONPATH, and name the commit in test_older_checkpoints.py.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from accel_fn.testing import simulate

BEFORE, STEPS = 4, 7  # of three steps an epoch
EMA = af.ema(0.5)


def loss_fn(model, batch):
    features, targets = batch
    return nn.functional.mse_loss(model(features), targets)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def make_loader(state):
    numbers = torch.arange(33, dtype=torch.float64)
    data = TensorDataset(numbers.reshape(11, 3).sin(), numbers[:11, None].cos())
    return af.shard_loader(DataLoader(data, batch_size=4, shuffle=True), state)


def make_step(state, model, average=EMA):
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=0.1
    )
    transforms = [af.clip(1.0), average, af.schedule(lambda step: 1 / (1 + step))]
    if state.world_size > 1:
        transforms.insert(0, af.wrap_ddp())
    return af.build(af.compose(*transforms)(af.Plan(loss_fn, model, optimizer)), state)


def train(state, step, loader, until):
    """Train to that step, over as many epochs as it takes; return the state."""
    for epoch in loader.epochs(3, since=state):
        for batch in epoch:
            state, _ = step(state, batch)
            if state.step == until:
                return state
    raise AssertionError(until)


def write(folder, model):
    def rank(state):
        state, step = make_step(state, copy.deepcopy(model))
        loader = make_loader(state)
        state = train(state, step, loader, BEFORE)
        af.save(step, state, folder, extras={"loader": loader}, only="trained")

    simulate(rank, world_size=2, seed=7)


if __name__ == "__main__":
    write(Path(sys.argv[1]), make_model())
