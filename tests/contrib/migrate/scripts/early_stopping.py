"""Early stopping by accelerate: a rank that sets the trigger stops all."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EarlyStopping:
    """Stops when the loss has not fallen by 1% for some batches."""

    def __init__(self, patience=3):
        self.patience, self.lowest, self.count = patience, float("inf"), 0

    def check(self, loss):
        if loss < 0.99 * self.lowest:
            self.lowest, self.count = loss, 0
        else:
            self.count += 1
        return self.count >= self.patience


def training_function():
    accelerator = Accelerator(cpu=True)
    early_stopping = EarlyStopping()
    torch.manual_seed(0)
    points = torch.randn(400, 4, dtype=torch.float64)
    data = TensorDataset(points, points.sum(dim=1, keepdim=True) ** 2)
    loader = DataLoader(data, batch_size=10)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    model = model.to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    num_updates = 0
    for _ in range(3):
        for step, (points, targets) in enumerate(loader):
            loss = F.mse_loss(model(points), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            num_updates += 1
            if early_stopping.check(loss.item()):
                accelerator.set_trigger()
            if accelerator.check_trigger():
                accelerator.print(loss.item(), step)
                break
    accelerator.print(num_updates)
    accelerator.print(*[value.item() for each in model.parameters() for value in each.flatten()])


if __name__ == "__main__":
    training_function()
