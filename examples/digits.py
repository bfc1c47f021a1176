"""Train a small CNN on 1,797 real handwritten digits, on one process or on several.

    python examples/digits.py
    torchrun --nproc-per-node 2 examples/digits.py

Both see the same batches and follow the same loss curve, up to rounding.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import accel_fn as af

UNFIT = {
    "Adahessian": "differentiates the gradients",
    "Muon": "is for matrices alone",
    "SparseAdam": "is for sparse gradients alone",
}
"""Optimizers that cannot train this model, and why."""


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # layers this small gain nothing from more
    state = af.init(device=args.device, seed=args.seed)
    af.on_main(lambda: args.out.mkdir(parents=True, exist_ok=True), state)

    torch.manual_seed(args.seed)
    model = build_model()
    recipe = af.compose(
        af.place(),
        af.wrap_ddp(),
        af.compose() if args.precision == "no" else af.with_amp(args.precision),
        af.accumulate(args.num_microbatches),
        af.clip(1.0),
    )
    optimizer = build_optimizer(args.optimizer, model, args.lr)
    state, step = af.build(state, recipe(af.Plan(loss_fn, model, optimizer)))

    train_data, test_data = load_data()
    loader = af.shard_loader(DataLoader(train_data, args.batch_size, shuffle=True), state)
    test_loader = af.shard_loader(DataLoader(test_data, args.batch_size), state)

    losses: list[Tensor] = []
    accuracies = [accuracy(step, test_loader, state)]
    with tqdm(total=args.epochs * len(loader), unit="batch", disable=not state.is_main) as bar:
        for epoch in loader.epochs(args.epochs, since=state):
            for batch in epoch:
                state, report = step(state, batch)
                losses.append(report.loss)
                bar.update()
            accuracies.append(accuracy(step, test_loader, state))
            bar.set_postfix(loss=f"{losses[-1]:.4f}", test_accuracy=f"{accuracies[-1]:.4f}")

    curves = {"loss": [loss.item() for loss in losses], "test_accuracy": accuracies}
    af.on_main(lambda: write_results(args.out, model, curves), state)
    if state.is_main:
        print(f"test accuracy {accuracies[-1]:.4f} on {len(test_data)} digits never trained on")
        print(f"written to {args.out}: model.safetensors, curves.png, curves.json")


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Images [n, 1, 8, 8] from 0 to 1 and labels [n]: 1,437 to train on, the same 360 to test on."""
    images, labels = load_digits(return_X_y=True)
    train_rows, test_rows = train_test_split(
        range(len(labels)), test_size=360, stratify=labels, random_state=0
    )
    data = TensorDataset(torch.tensor(images).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    return TensorDataset(*data[train_rows]), TensorDataset(*data[test_rows])


def build_model() -> nn.Module:
    """Smooth in its parameters and inputs, so that a difference in rounding stays one."""
    return nn.Sequential(
        convolution(1, 32),
        convolution(32, 64),
        nn.AvgPool2d(2),
        convolution(64, 128),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 2 * 2, 10),
    )


def convolution(num_inputs: int, num_outputs: int) -> nn.Module:
    """A CNN with GroupNorm, which treats every sample alone; BatchNorm would mix those of one rank."""
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, kernel_size=3, padding=1),
        nn.GroupNorm(8, num_outputs),
        nn.GELU(),
    )


def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(step: af.Step, loader: Any, state: af.DistState) -> Any:
    """The share of right answers over all ranks."""
    return af.evaluate(step, loader, state, is_right, progress=False)["accuracy"]


def is_right(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Tensor]:
    images, labels = batch
    return {"accuracy": model(images).argmax(dim=1) == labels}


def find_optimizer(name: str) -> type[Optimizer]:
    """An optimizer of torch.optim, else of torch_optimizer, by its name in upper or lower case."""
    known = optimizers_of(torch.optim)
    if name.lower() not in known:
        import torch_optimizer  # here, so that only its own optimizers need it

        known = optimizers_of(torch_optimizer) | known
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0)[0]
        raise argparse.ArgumentTypeError(
            f"must be in torch.optim or torch_optimizer, got {name!r}; "
            f"the nearest is {known[near].__name__}"
        )
    kind = known[name.lower()]
    if kind.__name__ in UNFIT:
        raise argparse.ArgumentTypeError(
            f"must train a CNN from its gradients, got {kind.__name__}, which {UNFIT[kind.__name__]}"
        )
    return kind


def optimizers_of(module: ModuleType) -> dict[str, type[Optimizer]]:
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    return {kind.__name__.lower(): kind for kind in classes if Optimizer in kind.__mro__[1:]}


def build_optimizer(kind: type[Optimizer], model: nn.Module, lr: float | None) -> Optimizer:
    if kind.__name__ == "Lookahead":  # torch_optimizer's Lookahead wraps another optimizer
        return kind(build_optimizer(AdamW, model, lr))  # type: ignore[arg-type]
    options: dict[str, Any] = {"fused": True} if kind is AdamW else {}
    return kind(model.parameters(), **options if lr is None else {**options, "lr": lr})


def write_results(out: Path, model: nn.Module, curves: dict[str, list[float]]) -> None:
    save_file(model.state_dict(), out / "model.safetensors")
    (out / "curves.json").write_text(json.dumps(curves))

    losses, accuracies = curves.values()
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.semilogy(torch.linspace(0, len(accuracies) - 1, len(losses)), losses, linewidth=1)
    left.set(title="training loss of each batch", xlabel="epoch", ylabel="cross entropy")
    right.plot(accuracies, marker=".")
    right.axhline(accuracies[-1], color="grey", linewidth=0.8, linestyle="dashed")
    right.set(title=f"test accuracy {accuracies[-1]:.4f}", xlabel="epoch", ylim=(0, 1.02))
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out / "curves.png", dpi=150)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, "(default: %(default)s)"
    classes = f"of torch.optim or torch_optimizer, by name {default}"
    add("--optimizer", type=find_optimizer, default="AdamW", help=classes)
    add("--lr", type=float, help="learning rate (default: the optimizer's own)")
    add("--epochs", type=int, default=20, help=f"passes over the training digits {default}")
    add("--batch-size", type=int, default=128, help=f"of one update, over all processes {default}")
    add("--num-microbatches", type=int, default=2, help=f"of each process, for memory {default}")
    add("--precision", choices=("bf16", "fp16", "no"), default="bf16", help=f"autocast {default}")
    add("--seed", type=int, default=0, help=f"of the first weights and the data order {default}")
    add("--device", help="such as cpu (default: an accelerator where there is one)")
    add("--out", type=Path, default=Path("runs/digits"), help=f"folder to write to {default}")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except KeyboardInterrupt:
        sys.exit("interrupted")
