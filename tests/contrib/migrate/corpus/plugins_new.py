"""plugins_old.py, moved by what `accel-fn migrate` prints."""

import torch
import torch.nn.functional as F
import accel_fn as af
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def main():
    state = af.init(seed=5)
    torch.manual_seed(5)
    is_deepspeed = None is not None
    is_fsdp = None is not None
    if state.is_main:
        print("plugins:", is_deepspeed, is_fsdp)
    data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
    dataloader = DataLoader(data, batch_size=8)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dataloader = af.shard_loader(dataloader, state, order="torch")

    def loss_fn(model, batch):
        inputs, targets = batch
        return F.mse_loss(model(inputs), targets)

    recipe = af.compose(af.place(), af.wrap_as_launched(), af.clip(0.5))
    plan = recipe(af.Plan(loss_fn, model, optimizer))
    state, step = af.build(plan, state)
    for epoch in dataloader.epochs(2):
        for batch in epoch:
            state, report = step(state, batch)


if __name__ == "__main__":
    main()
