"""What follows from `accel-fn migrate checkpointing.py`: started again, it resumes."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af


def loss_fn(model, batch):
    points, targets = batch
    return F.mse_loss(model(points), targets)


def training_function(args):
    state = af.init(device="cpu")
    torch.manual_seed(0)
    points = torch.randn(60, 4, dtype=torch.float64)
    data = TensorDataset(points, points.sum(dim=1, keepdim=True) ** 2)
    loader = DataLoader(data, batch_size=10)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    recipe = af.compose(af.place(), af.wrap_ddp())
    plan = recipe(af.Plan(loss_fn, model, optimizer))
    state, step = af.build(plan, state)
    loader = af.shard_loader(loader, state, order="torch")

    folder = "runs"
    state = af.resume(step, state, folder)
    for epoch in loader.epochs(4, since=state):
        for batch in epoch:
            state, _ = step(state, batch)
        af.save(step, state, folder)
        if epoch.index + 1 == args.stop_after:
            break
    values = [value.item() for each in model.parameters() for value in each.flatten()]
    af.print_on_main(*values, state=state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop-after", type=int)
    training_function(parser.parse_args())
