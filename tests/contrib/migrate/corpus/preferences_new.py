"""preferences_old.py, moved by what `accel-fn migrate` prints."""

import copy

import torch
import torch.nn.functional as F
import accel_fn as af
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def main():
    state = af.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    ref_model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(
        TensorDataset(torch.randn(64, 6), torch.randn(64, 6)), batch_size=16, shuffle=True
    )
    loader = af.shard_loader(loader, state, order="torch")

    def loss_fn(model, batch, *, frozen):
        chosen, rejected = batch
        with torch.no_grad():
            ref_margin = frozen["ref_model"](chosen) - frozen["ref_model"](rejected)
        margin = model(chosen) - model(rejected)
        losses = -F.logsigmoid(beta * (margin - ref_margin))
        return losses.mean()

    recipe = af.compose(af.place(), af.wrap_ddp())
    plan = recipe(af.Plan(loss_fn, model, optimizer, frozen={"ref_model": ref_model}))
    state, step = af.build(plan, state)
    beta = 0.3
    for epoch in loader.epochs(3):
        for batch in epoch:
            state, report = step(state, batch)
            af.print_on_main(report.loss.item(), state=state)


if __name__ == "__main__":
    main()
