"""In the style of accelerate's guide to accumulation: an epoch ends inside of a window."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def main():
    accelerator = Accelerator(gradient_accumulation_steps=4)
    torch.manual_seed(0)
    points = torch.randn(72, 4)
    dataloader = DataLoader(TensorDataset(points, points.sum(dim=1, keepdim=True)), batch_size=4)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    for epoch in range(2):
        for inputs, targets in dataloader:
            with accelerator.accumulate(model):
                outputs = model(inputs)
                loss = F.mse_loss(outputs, targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(epoch, loss.item())


if __name__ == "__main__":
    main()
