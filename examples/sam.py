"""Sharpness-aware minimization: two gradients for one update, made of the parts of a step.

    python examples/sam.py
    accel-fn launch -n 2 --cpu examples/sam.py

Data and network are those of digits.py, but three in ten training labels are random. A
plain step ends by learning those too; one that looks for flat minima (Foret et al. 2021,
arXiv:2010.01412) does so much less.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from digits import build_model, is_right, load_data, loss_fn
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af

StepFn = Callable[[af.DistState, Any], tuple[af.DistState, af.Report]]


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # layers this small gain nothing from more
    state = af.init(device=args.device, seed=args.seed)
    af.on_main(lambda: args.out.mkdir(parents=True, exist_ok=True), state)

    data = load_mislabelled_data()
    plain = train(lambda step: step, data, state, args)
    flat = train(partial(sharpness_aware, rho=args.rho), data, state, args)
    if state.is_main:
        print(f"{'':15}  test accuracy  rise of the training loss within {args.rho:g}")
        for name, result in (("plain", plain), ("sharpness-aware", flat)):
            print(f"{name:15}  {result['test_accuracy'][-1]:13.4f}  {result['sharpness']:.4f}")
    af.on_main(lambda: write_results(args.out, plain, flat), state)


def sharpness_aware(step: af.Step, rho: float) -> StepFn:
    """Update by the gradient from where, within `rho`, the loss is highest to first order."""

    def sharpness_aware_step(state: af.DistState, batch: Any) -> tuple[af.DistState, af.Report]:
        state, grads, report = step.grads(state, batch)
        with uphill(step.plan.model, grads, rho):
            state, grads, _ = step.grads(state, batch)
        return step.update(state, grads, report)

    return sharpness_aware_step


def sharpness(step: af.Step, state: af.DistState, batch: Any, rho: float) -> float:
    """How much higher the loss of a batch is there than here."""
    state, grads, report = step.grads(state, batch)
    with uphill(step.plan.model, grads, rho):
        return (step.forward(state, batch) - report.loss).item()


@contextmanager
def uphill(model: nn.Module, grads: af.Grads, rho: float) -> Iterator[None]:
    """The parameters `rho` further along their gradients; then the very bits that they had."""
    parameters = list(model.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    offsets = grads.scaled(rho / (grads.norm() + 1e-12)).values()
    with torch.no_grad():
        for parameter, offset in zip(parameters, offsets, strict=True):
            parameter.add_(offset)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, before, strict=True):
                parameter.copy_(values)


def train(
    change: Callable[[af.Step], StepFn],
    data: tuple[TensorDataset, TensorDataset],
    state: af.DistState,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Train from the start with a changed step; the loss of each batch, and what was learned."""
    torch.manual_seed(args.seed)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    recipe = af.compose(af.place(), af.wrap_ddp(), af.accumulate(2), af.clip(1.0))
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state)
    changed_step = change(step)

    train_data, test_data = data
    loader = af.shard_loader(DataLoader(train_data, batch_size=128, shuffle=True), state)
    test_loader = af.shard_loader(DataLoader(test_data, batch_size=128), state)
    losses, accuracies = [], []
    for epoch in af.progress(loader.epochs(args.epochs, since=state), state):
        for batch in epoch:
            state, report = changed_step(state, batch)
            losses.append(report.loss)
            epoch.show(report)
        found = af.evaluate(step, state, test_loader, is_right, progress=False)
        accuracies.append(found["accuracy"])
        epoch.show(accuracy=accuracies[-1])

    (everything,) = af.shard_loader(DataLoader(train_data, batch_size=len(train_data)), state)
    return {
        "loss": [loss.item() for loss in losses],
        "test_accuracy": accuracies,
        "sharpness": sharpness(step, state, everything, args.rho),
    }


def load_mislabelled_data() -> tuple[TensorDataset, TensorDataset]:
    """The digits, three in ten training labels drawn by chance; the test labels are right."""
    (images, labels), test_data = (data.tensors for data in load_data())
    chance = torch.Generator().manual_seed(0)
    wrong = torch.rand(len(labels), generator=chance) < 0.3
    labels = torch.where(wrong, torch.randint(10, labels.shape, generator=chance), labels)
    return TensorDataset(images, labels), TensorDataset(*test_data)


def write_results(out: Path, plain: dict[str, Any], flat: dict[str, Any]) -> None:
    (out / "curves.json").write_text(json.dumps({"plain": plain, "sharpness-aware": flat}))
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    for label, result in (("sharpness-aware", flat), ("plain", plain)):
        accuracies = result["test_accuracy"]
        axes.plot(range(1, len(accuracies) + 1), accuracies, marker=".", label=label)
    axes.set(
        title="test accuracy, three in ten training labels random", xlabel="epoch", ylim=(0.5, 1.01)
    )
    axes.legend(loc="lower right", frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out / "curves.png", dpi=150)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--rho", type=float, default=0.1, help=f"how far to look for a higher loss {default}")
    add("--epochs", type=int, default=30, help=f"passes over the training digits {default}")
    add("--seed", type=int, default=0, help=f"of the first weights and the data order {default}")
    add("--device", help="such as cpu (default: an accelerator where there is one)")
    add("--out", type=Path, default=Path("runs/sam"), help=f"folder to write to {default}")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except KeyboardInterrupt:
        sys.exit("interrupted")
