"""Gradient accumulation by accelerate, with clipping and a schedule."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def training_function():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    torch.manual_seed(0)
    points = torch.randn(64, 4, dtype=torch.float64)
    data = TensorDataset(points, points.sum(dim=1, keepdim=True) ** 2)
    loader = DataLoader(data, batch_size=4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(3):
        model.train()
        for points, targets in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(points), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}")
    accelerator.print(*[value.item() for each in model.parameters() for value in each.flatten()])
    accelerator.end_training()


if __name__ == "__main__":
    training_function()
