"""two_optimizers_old.py, moved by what `accel-fn migrate` prints."""

import torch
import torch.nn.functional as F
import accel_fn as af
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def main():
    state = af.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    body = torch.optim.SGD(net[0].parameters(), lr=0.05)
    optim_head = torch.optim.Adam(net[2].parameters(), lr=0.01)
    optim_body = body
    scheduler = torch.optim.lr_scheduler.StepLR(optim_head, 1, gamma=0.5)
    train_loader = DataLoader(TensorDataset(torch.randn(50, 5), torch.randn(50, 1)), batch_size=10)
    model = net
    train_dl = af.shard_loader(train_loader, state, order="torch")

    def loss_fn(model, batch):
        inputs, targets = batch
        return F.mse_loss(model(inputs), targets)

    recipe = af.compose(af.place(), af.wrap_ddp(), af.schedule(scheduler, every=train_dl))
    plan = recipe(af.Plan(loss_fn, model, {"optim_body": optim_body, "optim_head": optim_head}))
    state, step = af.build(plan, state)
    for epoch in train_dl.epochs(3):
        for batch in epoch:
            state, report = step(state, batch)
        af.print_on_main(epoch.index, report.loss.item(), state=state)


if __name__ == "__main__":
    main()
