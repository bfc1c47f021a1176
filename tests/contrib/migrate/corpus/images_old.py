"""In the style of accelerate's CV example: a frozen backbone, images scaled in the loop, OneCycleLR."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def training_function(num_epochs=2, batch_size=8):
    accelerator = Accelerator()
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(44, 3, 4, 4), torch.randint(0, 3, (44,)))
    train_dataloader = DataLoader(data, shuffle=True, batch_size=batch_size)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    model = model.to(accelerator.device)
    for param in model[0].parameters():
        param.requires_grad = False
    mean = torch.tensor([0.4, 0.5, 0.6])[None, :, None, None].to(accelerator.device)
    std = torch.tensor([0.2, 0.2, 0.3])[None, :, None, None].to(accelerator.device)
    optimizer = torch.optim.Adam(params=model[3].parameters(), lr=0.04 / 25)
    lr_scheduler = OneCycleLR(
        optimizer=optimizer,
        max_lr=0.04,
        epochs=num_epochs,
        steps_per_epoch=len(train_dataloader) // accelerator.num_processes,
    )
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    overall_step = 0
    for epoch in range(num_epochs):
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dataloader):
            batch = [each.to(accelerator.device) for each in batch]
            inputs = (batch[0] - mean) / std
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, batch[1])
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
        accelerator.print(epoch, total_loss.item() / len(train_dataloader))


if __name__ == "__main__":
    training_function()
