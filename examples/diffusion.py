"""Generate handwritten digits by diffusion: noise of the global batch, samples from an average.

    python examples/diffusion.py
    accel-fn launch -n 2 --cpu examples/diffusion.py

The data are the 1,797 digits of 8x8 pixels that come with scikit-learn.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af

BATCH, EPOCHS, NUM_TIMES = 128, 40, 50
KEPT = torch.linspace(1e-3, 0.2, NUM_TIMES).neg().log1p().cumsum(0).exp()
"""At each time, the share of the image in the variance of image and noise."""


class Denoiser(nn.Module):
    """Predicts the noise in an image [n, 64], given its time and its label."""

    def __init__(self, width=256):
        super().__init__()
        self.time, self.label = nn.Embedding(NUM_TIMES, width), nn.Embedding(10, width)
        self.begin, self.end = nn.Linear(64, width), nn.Linear(width, 64)
        self.middle = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, noisy, time, label):
        hidden = self.begin(noisy) + self.time(time) + self.label(label)
        for layer in self.middle:
            hidden = hidden + layer(F.gelu(hidden))
        return self.end(F.gelu(hidden))


def loss_fn(model, batch):
    kept = KEPT.to(batch["image"].device)[batch["time"]].unsqueeze(1)
    noisy = kept.sqrt() * batch["image"] + (1 - kept).sqrt() * batch["noise"]
    return F.mse_loss(model(noisy, batch["time"], batch["label"]), batch["noise"])


def draw(generator):
    """Times and noise of a whole batch, so that they do not depend on the number of ranks."""
    return {
        "time": torch.randint(NUM_TIMES, (BATCH,), generator=generator),
        "noise": torch.randn(BATCH, 64, generator=generator),
    }


@torch.no_grad()
def generate(model, label):
    """Turn noise into images of these labels, by the steps of DDPM."""
    generator = torch.Generator().manual_seed(0)  # the same images on every rank
    image = torch.randn(len(label), 64, generator=generator).to(label.device)
    for time in reversed(range(NUM_TIMES)):
        kept, before = KEPT[time], KEPT[time - 1] if time else torch.tensor(1.0)
        noise = model(image, torch.full_like(label, time), label)
        factor = kept / before
        image = (image - (1 - factor) / (1 - kept).sqrt() * noise) / factor.sqrt()
        if time:
            fresh = torch.randn(image.shape, generator=generator).to(label.device)
            image = image + ((1 - before) / (1 - kept) * (1 - factor)).sqrt() * fresh
    return image


def main():
    state = af.init()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images).float() / 8 - 1, torch.tensor(labels)
    loader = DataLoader(TensorDataset(images, labels), BATCH, shuffle=True, drop_last=True)
    loader = af.shard_loader(loader, state)

    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    recipe = af.compose(
        af.place(), af.wrap_ddp(), af.ema(0.99), af.log_to("runs/diffusion/log.jsonl")
    )
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state)
    for epoch in loader.epochs(EPOCHS, since=state):
        for image, label in epoch:
            batch = {"image": image, "label": label, **af.draw(draw, state)}
            state, report = step(state, batch)
        if state.is_main and epoch.index % 5 == 4:
            print(f"epoch {epoch.index}  loss {report.loss:.4f}")

    wanted = torch.arange(10).repeat(20)
    with af.averaged(step):
        drawn = generate(model, wanted.to(state.device)).cpu()
    accuracy = KNeighborsClassifier().fit(images, labels).score(drawn, wanted)
    if state.is_main:
        print(f"accuracy {accuracy:.4f}: the nearest real digits have the label of a generated one")


if __name__ == "__main__":
    main()
