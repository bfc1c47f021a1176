"""Checkpoints by accelerate after each epoch; `--resume FOLDER` goes on from one."""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def training_function(args):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    points = torch.randn(60, 4, dtype=torch.float64)
    data = TensorDataset(points, points.sum(dim=1, keepdim=True) ** 2)
    loader = DataLoader(data, batch_size=10)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    starting_epoch = 0
    if args.resume:
        accelerator.load_state(args.resume)
        starting_epoch = int(os.path.basename(args.resume).removeprefix("epoch_")) + 1

    for epoch in range(starting_epoch, 4):
        for points, targets in loader:
            loss = F.mse_loss(model(points), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(os.path.join("runs", f"epoch_{epoch}"))
        if epoch + 1 == args.stop_after:
            break
    accelerator.print(*[value.item() for each in model.parameters() for value in each.flatten()])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--stop-after", type=int)
    training_function(parser.parse_args())
