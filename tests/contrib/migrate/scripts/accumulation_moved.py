"""What follows from `accel-fn migrate accumulation.py`."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af


def loss_fn(model, batch):
    points, targets = batch
    return F.mse_loss(model(points), targets)


def training_function():
    state = af.init(device="cpu")
    torch.manual_seed(0)
    points = torch.randn(64, 4, dtype=torch.float64)
    data = TensorDataset(points, points.sum(dim=1, keepdim=True) ** 2)
    loader = DataLoader(data, batch_size=4 * 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    recipe = af.compose(
        af.place(),
        af.wrap_ddp(),
        af.accumulate(4),
        af.schedule(scheduler),
        af.clip(1.0),
    )
    plan = recipe(af.Plan(loss_fn, model, optimizer))
    state, step = af.build(plan, state)
    loader = af.shard_loader(loader, state, order="torch")

    for epoch in loader.epochs(3):
        for batch in epoch:
            state, _ = step(state, batch)
        af.print_on_main(f"epoch {epoch.index}", state=state)
    values = [value.item() for each in model.parameters() for value in each.flatten()]
    af.print_on_main(*values, state=state)


if __name__ == "__main__":
    training_function()
