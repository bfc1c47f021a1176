"""A short training that logs to a run and to a file: `train.py LIBRARY FOLDER`."""

import importlib
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import accel_fn as af


def loss_fn(model, batch):
    x, y = batch
    loss = (model(x) - y).square().mean()
    return loss, {"nothing": loss.detach() * float("nan")}


def main(library: str, folder: Path) -> None:
    state = af.init()
    run = None
    if state.is_main:
        run = importlib.import_module(f"tests.trackers.{library}_run").start(folder)
    model = nn.Linear(3, 1)
    recipe = af.compose(af.wrap_ddp(), af.clip(1.0), af.log_to(run, folder / "log.jsonl", every=2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state)
    data = [(x, x.sum(0, keepdim=True)) for x in torch.randn(16, 3)]
    loader = af.shard_loader(DataLoader(data, batch_size=4, shuffle=True), state)
    for epoch in loader.epochs(2):
        for batch in epoch:
            state, _ = step(state, batch)
    # The last line is written as the process ends.


main(sys.argv[1], Path(sys.argv[2]))
