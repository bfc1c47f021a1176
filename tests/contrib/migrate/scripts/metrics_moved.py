"""What follows from `accel-fn migrate metrics.py`."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af


def loss_fn(model, batch):
    points, labels = batch
    return F.cross_entropy(model(points), labels)


def training_function():
    state = af.init(device="cpu")
    torch.manual_seed(0)
    points = torch.randn(103, 2, dtype=torch.float64)
    data = TensorDataset(points, (points.norm(dim=1) < 1).long())
    train_loader = DataLoader(data, batch_size=10)
    eval_loader = DataLoader(data, batch_size=16)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    recipe = af.compose(af.place(), af.wrap_ddp())
    plan = recipe(af.Plan(loss_fn, model, optimizer))
    state, step = af.build(plan, state)
    train_loader = af.shard_loader(train_loader, state, order="torch")
    eval_loader = af.shard_loader(eval_loader, state)

    for epoch in train_loader.epochs(3):
        for batch in epoch:
            state, _ = step(state, batch)
        right = []

        def predict_fn(model, batch):
            points, labels = batch
            predictions = model(points).argmax(dim=1)
            return predictions, labels

        predictions, labels = af.predict(step, state, eval_loader, predict_fn)
        right.append(predictions == labels)
        accuracy = torch.cat(right).double().mean().item()
        af.print_on_main(accuracy, state=state)


if __name__ == "__main__":
    training_function()
