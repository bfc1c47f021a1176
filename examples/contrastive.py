"""Learn embeddings of handwritten digits without their labels: SimCLR, whose loss gathers.

    python examples/contrastive.py
    accel-fn launch -n 2 --cpu examples/contrastive.py

Two noisy, shifted views of each digit must find each other among all views of the batch, on all
ranks. Labels come last: they measure whether digits with near embeddings are alike.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af

BATCH, EPOCHS = 128, 10


def simclr(state, temperature=0.2):
    def loss_fn(model, batch):
        a, b = (F.normalize(model(views)) for views in batch["views"].unbind(dim=1))
        every_a, every_b = af.gather((a, b), state)  # the rows of all ranks, with their gradients
        first = sum(af.gather([len(a)], state)[: state.rank])  # where this rank's rows begin
        labels = first + torch.arange(len(a), device=a.device)
        return (
            F.cross_entropy(a @ every_b.T / temperature, labels)
            + F.cross_entropy(b @ every_a.T / temperature, labels)
        ) / 2

    return loss_fn


def augment(images, state):
    """Two views of each image [n, 1, 8, 8]: shifted by up to one pixel, with noise."""

    def draw(generator):  # for the whole batch, so that views do not depend on the number of ranks
        shifts = torch.randint(3, (BATCH, 2, 2), generator=generator)
        return shifts, torch.randn(BATCH, 2, 1, 8, 8, generator=generator)

    shifts, noise = af.draw(draw, state)
    padded = F.pad(images, (1, 1, 1, 1))
    views = [
        torch.stack([padded[i, :, y : y + 8, x : x + 8] for y, x in of_image])
        for i, of_image in enumerate(shifts.tolist())
    ]
    return torch.stack(views) + 0.2 * noise


def main():
    state = af.init()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images).float().view(-1, 1, 8, 8) / 16
    loader = DataLoader(TensorDataset(images[:1437]), BATCH, shuffle=True, drop_last=True)
    loader = af.shard_loader(loader, state)
    every_image = af.shard_loader(DataLoader(TensorDataset(images), BATCH), state)

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.GELU(), nn.Conv2d(32, 32, 3), nn.GELU(), nn.Flatten()
    )
    model.append(nn.Linear(32 * 4 * 4, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    recipe = af.compose(af.place(), af.wrap_ddp(), af.log_to("runs/contrastive/log.jsonl"))
    state, step = af.build(recipe(af.Plan(simclr(state), model, optimizer)), state)

    for epoch in loader.epochs(EPOCHS, since=state):
        for (part,) in epoch:
            state, report = step(state, {"views": augment(part, state)})
        if state.is_main:
            print(f"epoch {epoch.index}  loss {report.loss:.4f}")

    embeddings = af.predict(step, state, every_image, lambda model, batch: model(batch[0]))
    neighbours = KNeighborsClassifier().fit(embeddings[:1437], labels[:1437])
    accuracy = neighbours.score(embeddings[1437:], labels[1437:])
    if state.is_main:
        print(f"accuracy {accuracy:.4f} of the nearest neighbours of {len(labels) - 1437} digits")


if __name__ == "__main__":
    main()
