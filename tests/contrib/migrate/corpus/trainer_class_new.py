"""trainer_class_old.py, moved by what `accel-fn migrate` prints."""

import torch
import torch.nn.functional as F
import accel_fn as af
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
        self.state = af.init()
        self.model = model
        self.gradient_accumulate_every = gradient_accumulate_every
        self.train_num_steps = train_num_steps
        self.max_grad_norm = max_grad_norm
        dl = DataLoader(
            dataset, batch_size=train_batch_size * self.gradient_accumulate_every, shuffle=True
        )
        dl = af.shard_loader(dl, self.state, order="torch")
        self.dl = cycle(dl)
        self.opt = torch.optim.Adam(model.parameters(), lr=train_lr)
        if self.state.is_main:
            self.ema = EMA(model, beta=ema_decay)
            self.ema.to(self.state.device)
        self.step = 0

        def loss_fn(model, batch):
            data = batch[0]
            return model(data)

        recipe = af.compose(
            af.place(),
            af.wrap_ddp(),
            af.accumulate(self.gradient_accumulate_every),
            af.clip(self.max_grad_norm),
        )
        plan = recipe(af.Plan(loss_fn, self.model, self.opt))
        self.state, self.train_step = af.build(plan, self.state)

    def train(self):
        device = self.state.device
        while self.step < self.train_num_steps:
            total_loss = 0.0
            batch = next(self.dl)
            self.state, report = self.train_step(self.state, batch)
            total_loss += report.loss.item()
            af.barrier(self.state)
            af.barrier(self.state)
            self.step += 1
            if self.state.is_main:
                self.ema.update()
                af.print_on_main(f"{self.step}: {total_loss}", state=self.state)
        af.print_on_main("training complete", state=self.state)


if __name__ == "__main__":
    torch.manual_seed(0)
    Trainer(Autoencoder(), TensorDataset(torch.randn(64, 6))).train()
