"""In the style of research code: one loss, two optimizers, an epoch's schedule for one of them."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def main():
    accelerator = Accelerator()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    body = torch.optim.SGD(net[0].parameters(), lr=0.05)
    optim_head = torch.optim.Adam(net[2].parameters(), lr=0.01)
    optim_body = body
    scheduler = torch.optim.lr_scheduler.StepLR(optim_head, 1, gamma=0.5)
    train_loader = DataLoader(TensorDataset(torch.randn(50, 5), torch.randn(50, 1)), batch_size=10)
    model, optim_body, optim_head, train_dl, scheduler = accelerator.prepare(
        net, optim_body, optim_head, train_loader, scheduler
    )
    for epoch in range(3):
        for batch in train_dl:
            inputs, targets = batch
            optim_body.zero_grad()
            optim_head.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optim_body.step()
            optim_head.step()
        scheduler.step()
        accelerator.print(epoch, loss.item())


if __name__ == "__main__":
    main()
