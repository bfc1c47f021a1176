"""Accuracy over all processes by accelerate's gather_for_metrics."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def training_function():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    points = torch.randn(103, 2, dtype=torch.float64)
    data = TensorDataset(points, (points.norm(dim=1) < 1).long())
    train_loader = DataLoader(data, batch_size=10)
    eval_loader = DataLoader(data, batch_size=16)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(
        model, optimizer, train_loader, eval_loader
    )

    for _ in range(3):
        model.train()
        for points, labels in train_loader:
            loss = F.cross_entropy(model(points), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        right = []
        for points, labels in eval_loader:
            with torch.no_grad():
                predictions = model(points).argmax(dim=1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            right.append(predictions == labels)
        accuracy = torch.cat(right).double().mean().item()
        accelerator.print(accuracy)


if __name__ == "__main__":
    training_function()
