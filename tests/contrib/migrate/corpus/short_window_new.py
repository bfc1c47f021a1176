"""short_window_old.py, moved by what `accel-fn migrate` prints."""

import torch
import torch.nn.functional as F
import accel_fn as af
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def main():
    state = af.init()
    torch.manual_seed(0)
    points = torch.randn(72, 4)
    dataloader = DataLoader(
        TensorDataset(points, points.sum(dim=1, keepdim=True)), batch_size=4 * 4
    )
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dataloader = af.shard_loader(dataloader, state, order="torch")

    def loss_fn(model, batch):
        inputs, targets = batch
        outputs = model(inputs)
        return F.mse_loss(outputs, targets)

    recipe = af.compose(af.place(), af.wrap_ddp(), af.accumulate(4))
    plan = recipe(af.Plan(loss_fn, model, optimizer))
    state, step = af.build(plan, state)
    for epoch in dataloader.epochs(2):
        for batch in epoch:
            state, report = step(state, batch)
        af.print_on_main(epoch.index, report.loss.item(), state=state)


if __name__ == "__main__":
    main()
