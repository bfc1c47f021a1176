"""In the style of lucidrains: a generator and a discriminator, each with its optimizer."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def main():
    accelerator = Accelerator()
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(60, 2)), batch_size=12, shuffle=True)
    generator, discriminator, g_optimizer, d_optimizer, loader = accelerator.prepare(
        generator, discriminator, g_optimizer, d_optimizer, loader
    )
    for epoch in range(2):
        for batch in loader:
            real = batch[0]
            noise = torch.randn(real.shape[0], 4)
            with torch.no_grad():
                fake = generator(noise)
            d_real = F.softplus(-discriminator(real)).mean()
            d_loss = d_real + F.softplus(discriminator(fake)).mean()
            d_optimizer.zero_grad()
            accelerator.backward(d_loss)
            accelerator.clip_grad_norm_(discriminator.parameters(), 1.0)
            d_optimizer.step()

            noise_g = torch.randn(real.shape[0], 4)
            g_loss = F.softplus(-discriminator(generator(noise_g))).mean()
            g_optimizer.zero_grad()
            accelerator.backward(g_loss)
            g_optimizer.step()
        accelerator.print(epoch, d_loss.item(), g_loss.item())


if __name__ == "__main__":
    main()
