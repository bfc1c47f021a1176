"""Learn whether a point lies inside the unit circle: the program of the README.

python examples/circle.py
accel-fn launch -n 2 --cpu examples/circle.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af

torch.manual_seed(0)
points = torch.randn(1000, 2)
data = TensorDataset(points, (points.norm(dim=1) < 1).long())
model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=64, shuffle=True)


def loss_fn(model, batch):
    points, inside = batch
    return F.cross_entropy(model(points), inside)


recipe = af.compose(af.place(), af.wrap_ddp(), af.accumulate(4), af.clip(1.0))
state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), af.init())
loader = af.shard_loader(loader, state)  # a batch is 64 samples over all ranks

for epoch in range(5):
    for batch in loader:
        state, report = step(state, batch)
    if state.is_main:
        print(f"epoch {epoch}  loss {report.loss:.4f}")
