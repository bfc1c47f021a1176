"""In the style of lucidrains: a class that trains in `while`, and accumulates with `next`."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from ema_pytorch import EMA
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def cycle(dl):
    while True:
        for data in dl:
            yield data


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6))

    def forward(self, images):
        return F.mse_loss(self.layers(images), images)


class Trainer:
    def __init__(
        self,
        model,
        dataset,
        *,
        train_batch_size=8,
        gradient_accumulate_every=2,
        train_lr=0.01,
        train_num_steps=10,
        max_grad_norm=1.0,
        ema_decay=0.95,
    ):
        self.accelerator = Accelerator()
        self.model = model
        self.gradient_accumulate_every = gradient_accumulate_every
        self.train_num_steps = train_num_steps
        self.max_grad_norm = max_grad_norm
        dl = DataLoader(dataset, batch_size=train_batch_size, shuffle=True)
        dl = self.accelerator.prepare(dl)
        self.dl = cycle(dl)
        self.opt = torch.optim.Adam(model.parameters(), lr=train_lr)
        if self.accelerator.is_main_process:
            self.ema = EMA(model, beta=ema_decay)
            self.ema.to(self.accelerator.device)
        self.step = 0
        self.model, self.opt = self.accelerator.prepare(self.model, self.opt)

    def train(self):
        accelerator = self.accelerator
        device = accelerator.device
        while self.step < self.train_num_steps:
            self.model.train()
            total_loss = 0.0
            for _ in range(self.gradient_accumulate_every):
                data = next(self.dl)[0].to(device)
                with self.accelerator.autocast():
                    loss = self.model(data)
                    loss = loss / self.gradient_accumulate_every
                    total_loss += loss.item()
                self.accelerator.backward(loss)
            accelerator.wait_for_everyone()
            accelerator.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            self.opt.step()
            self.opt.zero_grad()
            accelerator.wait_for_everyone()
            self.step += 1
            if accelerator.is_main_process:
                self.ema.update()
                accelerator.print(f"{self.step}: {total_loss}")
        accelerator.print("training complete")


if __name__ == "__main__":
    torch.manual_seed(0)
    Trainer(Autoencoder(), TensorDataset(torch.randn(64, 6))).train()
