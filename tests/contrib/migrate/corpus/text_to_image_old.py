"""In the style of diffusers: frozen encoders in half precision, drawn noise, an EMA, a warm-up."""

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4 + 3 + 1, 16), nn.SiLU(), nn.Linear(16, 4))

    def forward(self, noisy, timesteps, text):
        return self.layers(torch.cat([noisy, text, timesteps[:, None] / 100], dim=1))


class EMAModel:
    def __init__(self, model, decay=0.99):
        self.model, self.decay = copy.deepcopy(model), decay

    def step(self, parameters):
        for mean, new in zip(self.model.parameters(), parameters, strict=True):
            mean.data.lerp_(new.detach(), 1 - self.decay)


def add_noise(latents, noise, timesteps):
    alpha = torch.cos(timesteps / 100)[:, None]
    return alpha * latents + (1 - alpha**2).sqrt() * noise


def main(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    torch.manual_seed(args.seed)
    vae, text_encoder, unet = nn.Linear(8, 4), nn.Linear(5, 3), Denoiser()
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)
    ema_unet = EMAModel(unet, decay=0.99)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.learning_rate)
    data = TensorDataset(torch.randn(48, 8), torch.randn(48, 5))
    train_dataloader = DataLoader(data, batch_size=args.train_batch_size, shuffle=True)

    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=0.1, total_iters=args.lr_warmup_steps * accelerator.num_processes
    )
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        unet, optimizer, train_dataloader, lr_scheduler
    )
    weight_dtype = torch.float64
    text_encoder.to(accelerator.device, dtype=weight_dtype)
    vae.to(accelerator.device, dtype=weight_dtype)

    global_step = 0
    for epoch in range(args.num_train_epochs):
        train_loss = 0.0
        for step, batch in enumerate(train_dataloader):
            with accelerator.accumulate(unet):
                latents = vae(batch[0].to(weight_dtype))
                latents = latents * 0.5
                noise = torch.randn_like(latents)
                bsz = latents.shape[0]
                timesteps = torch.randint(0, 100, (bsz,), device=latents.device)
                timesteps = timesteps.long()
                noisy_latents = add_noise(latents, noise, timesteps)
                text = text_encoder(batch[1])
                model_pred = unet(noisy_latents, timesteps, text)
                loss = F.mse_loss(model_pred.float(), noise.float(), reduction="mean")
                avg_loss = accelerator.gather(loss.repeat(args.train_batch_size)).mean()
                train_loss += avg_loss.item() / args.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema_unet.step(unet.parameters())
                global_step += 1
                accelerator.print({"loss": train_loss, "lr": lr_scheduler.get_last_lr()[0]})
                train_loss = 0.0
            if global_step >= max_train_steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--lr_warmup_steps", type=int, default=5)
    parser.add_argument("--learning_rate", type=float, default=0.01)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
