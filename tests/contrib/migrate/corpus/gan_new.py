"""gan_old.py, moved by what `accel-fn migrate` prints."""

import torch
import torch.nn.functional as F
import accel_fn as af
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


def main():
    state = af.init()
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(60, 2)), batch_size=12, shuffle=True)
    loader = af.shard_loader(loader, state, order="torch")

    def loss_fn_discriminator(model, batch):
        batch, noise = batch
        real = batch[0]
        with torch.no_grad():
            fake = generator(noise)
        d_real = F.softplus(-model(real)).mean()
        return d_real + F.softplus(model(fake)).mean()

    recipe_discriminator = af.compose(af.place(), af.wrap_ddp(), af.clip(1.0))
    plan_discriminator = recipe_discriminator(
        af.Plan(loss_fn_discriminator, discriminator, d_optimizer)
    )
    state, step_discriminator = af.build(plan_discriminator, state)

    def loss_fn_generator(model, batch):
        batch, noise_g = batch
        return F.softplus(-discriminator(model(noise_g))).mean()

    recipe_generator = af.compose(af.place(), af.wrap_ddp())
    plan_generator = recipe_generator(af.Plan(loss_fn_generator, generator, g_optimizer))
    state, step_generator = af.build(plan_generator, state)
    for epoch in loader.epochs(2):
        for batch in epoch:
            noise = af.draw(
                lambda generator, n: torch.randn(n, 4, generator=generator),
                state,
                "noise",
                rows=batch,
            )
            state, report_discriminator = step_discriminator(state, (batch, noise), advance=False)
            noise_g = af.draw(
                lambda generator, n: torch.randn(n, 4, generator=generator),
                state,
                "noise_g",
                rows=batch,
            )
            state, report_generator = step_generator(state, (batch, noise_g))
        af.print_on_main(
            epoch.index, report_discriminator.loss.item(), report_generator.loss.item(), state=state
        )


if __name__ == "__main__":
    main()
