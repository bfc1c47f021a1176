"""What follows from `accel-fn migrate early_stopping.py`."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af


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


def loss_fn(model, batch):
    points, targets = batch
    return F.mse_loss(model(points), targets)


def training_function():
    state = af.init(device="cpu")
    early_stopping = EarlyStopping()
    torch.manual_seed(0)
    points = torch.randn(400, 4, dtype=torch.float64)
    data = TensorDataset(points, points.sum(dim=1, keepdim=True) ** 2)
    loader = DataLoader(data, batch_size=10)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    recipe = af.compose(af.place(), af.wrap_ddp())
    plan = recipe(af.Plan(loss_fn, model, optimizer))
    state, train_step = af.build(plan, state)
    loader = af.shard_loader(loader, state, order="torch")

    num_updates = 0
    for epoch in loader.epochs(3):
        for step, batch in enumerate(epoch):
            state, report = train_step(state, batch)
            num_updates += 1
            stop = False
            if early_stopping.check(report.loss.item()):
                stop = True
            if af.any_rank(stop, state):
                af.print_on_main(report.loss.item(), step, state=state)
                break
    af.print_on_main(num_updates, state=state)
    values = [value.item() for each in model.parameters() for value in each.flatten()]
    af.print_on_main(*values, state=state)


if __name__ == "__main__":
    training_function()
