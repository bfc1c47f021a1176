"""Learn to draw handwritten digits: a GAN is two steps and two optimizers over one state.

    python examples/gan.py
    accel-fn launch -n 2 --cpu examples/gan.py

Two networks conditioned on the digit, a relativistic loss with penalized slopes
(Huang et al. 2024, arXiv:2501.05441), and 1,797 real digits to learn from.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import accel_fn as af

NUM_PIXELS, NUM_NOISE, NUM_LABELS = 8 * 8, 16, 10


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # layers this small gain nothing from more
    state = af.init(device=args.device, seed=args.seed)
    af.on_main(lambda: args.out.mkdir(parents=True, exist_ok=True), state)

    torch.manual_seed(args.seed)
    generator, discriminator = Network(NUM_NOISE, NUM_PIXELS), Network(NUM_PIXELS, 1)
    d_loss = partial(discriminator_loss, generator=generator)
    g_loss = partial(generator_loss, discriminator=discriminator)
    recipe = af.compose(af.place(), af.wrap_ddp(), af.accumulate(2))
    state, d_step = af.build(recipe(af.Plan(d_loss, discriminator, adam(discriminator))), state)
    state, g_step = af.build(recipe(af.Plan(g_loss, generator, adam(generator))), state)

    data = DigitsWithNoise(args.passes)
    loader = af.shard_loader(DataLoader(data, batch_size=128, shuffle=True), state)
    d_losses, g_losses = [], []
    for batch in af.progress(loader, state):
        state, d_report = d_step(state, batch, advance=False)  # one batch counts once
        state, g_report = g_step(state, batch)
        d_losses.append(d_report.loss)
        g_losses.append(g_report.loss)

    losses = {
        "discriminator": [loss.item() for loss in d_losses],
        "generator": [loss.item() for loss in g_losses],
    }
    af.on_main(lambda: write_results(args.out, generator, data, losses, state.device), state)


class Network(nn.Module):
    """Three layers conditioned on the label; smooth, since slopes are a part of the loss."""

    def __init__(self, num_inputs: int, num_outputs: int, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_inputs + NUM_LABELS, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, num_outputs),
        )

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """[n, num_inputs] and labels [n] to [n, num_outputs]."""
        return self.layers(torch.cat([inputs, F.one_hot(labels, NUM_LABELS)], dim=1))


class DigitsWithNoise(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Sample i is a real digit, its label, and noise seeded by i.

    Noise that belongs to the sample is shared out among the ranks with it, so
    it does not depend on how many there are; and no pass repeats another's.
    """

    def __init__(self, num_passes: int) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images).float() / 16, torch.tensor(labels)
        self.num_passes = num_passes

    def __len__(self) -> int:
        return self.num_passes * len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        noise = torch.randn(NUM_NOISE, generator=torch.Generator().manual_seed(index))
        digit = index % len(self.images)
        return self.images[digit], self.labels[digit], noise


def draw(generator: nn.Module, noise: Tensor, labels: Tensor) -> Tensor:
    return torch.sigmoid(generator(noise, labels))


def discriminator_loss(
    discriminator: nn.Module, batch: Sequence[Tensor], *, generator: nn.Module
) -> Tensor:
    """A real digit must score above the drawn one beside it, by slopes that are not too steep."""
    real, labels, noise = batch
    with torch.no_grad():
        drawn = draw(generator, noise, labels)
    images = torch.stack([real, drawn]).requires_grad_()
    real_score, drawn_score = [discriminator(each, labels) for each in images]
    (slopes,) = torch.autograd.grad(real_score.sum() + drawn_score.sum(), images, create_graph=True)
    return F.softplus(drawn_score - real_score).mean() + 0.2 * slopes.square().sum(dim=-1).mean()


def generator_loss(
    generator: nn.Module, batch: Sequence[Tensor], *, discriminator: nn.Module
) -> Tensor:
    """A drawn digit must score above the real one; only the generator's parameters get gradients."""
    real, labels, noise = batch
    drawn = draw(generator, noise, labels)
    return F.softplus(discriminator(real, labels) - discriminator(drawn, labels)).mean()


def adam(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(network.parameters(), lr=2e-3, betas=(0.0, 0.99), fused=True)


def write_results(
    out: Path,
    generator: nn.Module,
    data: DigitsWithNoise,
    losses: dict[str, list[float]],
    device: torch.device,
) -> None:
    labels = torch.arange(1000) % NUM_LABELS
    noise = torch.randn(1000, NUM_NOISE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        drawn = draw(generator, noise.to(device), labels.to(device)).cpu()
    print_judgement(drawn, labels, data)
    plot(drawn, data).savefig(out / "digits.png", dpi=150)
    torch.save(drawn[:80], out / "digits.pt")
    (out / "losses.json").write_text(json.dumps(losses))


def print_judgement(drawn: Tensor, labels: Tensor, data: DigitsWithNoise) -> None:
    """Compare with the nearest real digit: is it the requested one, and how far away is it?"""
    distances, nearest = torch.cdist(drawn, data.images).min(dim=1)
    fitting = (data.labels[nearest] == labels).float().mean()
    real = torch.cdist(data.images, data.images).fill_diagonal_(torch.inf).min(dim=1).values
    shuffled = data.images.gather(0, torch.rand(data.images.shape).argsort(dim=0))
    noise = torch.cdist(shuffled, data.images).min(dim=1).values
    print(f"of 1,000 drawn digits, {fitting:.1%} are nearest to a real one of the requested label")
    print(
        f"distance to the nearest real digit: {distances.mean():.2f} drawn, "
        f"{real.mean():.2f} other real ones, {noise.mean():.2f} real ones with shuffled pixels"
    )


def plot(drawn: Tensor, data: DigitsWithNoise) -> Figure:
    """Eight of every digit, drawn and real."""
    rows = [data.images[data.labels == label][:8] for label in range(NUM_LABELS)]
    real = torch.stack(rows, dim=1).flatten(0, 1)
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    panels = zip(figure.subplots(1, 2), ("drawn", "real"), (drawn[: len(real)], real), strict=True)
    for axes, title, images in panels:
        spaced = F.pad(images.view(-1, 8, 8), (1, 1, 2, 2))
        tiles = rearrange(spaced, "(row column) h w -> (row h) (column w)", column=NUM_LABELS)
        axes.imshow(tiles, cmap="gray_r")
        axes.set(title=title, xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    return figure


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--passes", type=int, default=40, help=f"over the real digits {default}")
    add("--seed", type=int, default=0, help=f"of the first weights and the data order {default}")
    add("--device", help="such as cpu (default: an accelerator where there is one)")
    add("--out", type=Path, default=Path("runs/gan"), help=f"folder to write to {default}")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except KeyboardInterrupt:
        sys.exit("interrupted")
