"""Train a small CNN on 1,797 real handwritten digits, on one process or on several.

    python examples/digits.py
    accel-fn launch -n 2 --cpu examples/digits.py
    accel-fn launch -n 3 --cpu examples/digits.py

All see the same batches and follow the same loss curve, up to rounding. The picture that each run
writes has the curves of all of them.
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

Curves = dict[str, list[float]]

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
        af.with_amp(args.precision or fast_precision(state.device)),
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
    runs = af.on_main(lambda: write_results(args, model, curves, state.world_size), state)
    if state.is_main:
        print(f"test accuracy {accuracies[-1]:.4f} on {len(test_data)} digits never trained on")
        if len(runs) > 1:
            print(compare(runs))
        print(f"written to {args.out}: model.safetensors, curves.png")


def fast_precision(device: torch.device) -> str:
    """bf16 where the device has instructions for it; emulated, it takes up to 16 times as long."""
    known = torch.cpu.get_capabilities()  # of x86, or of Arm
    on_cpu = any(known.get(each) for each in ("avx512_bf16", "amx_bf16", "bf16"))
    return "bf16" if device.type != "cpu" or on_cpu else "no"


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


def write_results(
    args: argparse.Namespace, model: nn.Module, curves: Curves, world_size: int
) -> dict[int, Curves]:
    """Write weights, curves, and a picture of all runs in the folder that had the same settings."""
    save_file(model.state_dict(), args.out / "model.safetensors")
    settings = {name: str(value) for name, value in vars(args).items()}
    own = {"world_size": world_size, "settings": settings, "curves": curves}
    (args.out / f"curves_{world_size}.json").write_text(json.dumps(own))
    written = [json.loads(path.read_text()) for path in args.out.glob("curves_*.json")]
    alike = {each["world_size"]: each for each in written if each["settings"] == settings}
    runs = {size: alike[size]["curves"] for size in sorted(alike)}
    draw(runs).savefig(args.out / "curves.png", dpi=150)
    return runs


def compare(runs: dict[int, Curves]) -> str:
    """The largest distance between the loss curves, as a sentence."""
    losses = torch.tensor([each["loss"] for each in runs.values()])
    distance = (losses.amax(dim=0) - losses.amin(dim=0)).max().item()
    sizes = ", ".join(map(str, runs))
    return f"losses on {sizes} processes: at most {distance:.1e} apart in any of {losses.shape[1]} steps"


def draw(runs: dict[int, Curves]) -> Figure:
    """Losses and accuracies; the curve of more processes is thinner, so that those below it show."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, (size, curves) in enumerate(runs.items()):
        losses, accuracies = curves["loss"], curves["test_accuracy"]
        look = {"color": f"C{place}", "linewidth": max(6 - 2.5 * place, 1)}
        label = f"{size} process{'es' if size > 1 else ''}"
        left.semilogy(
            torch.linspace(0, len(accuracies) - 1, len(losses)), losses, label=label, **look
        )
        right.plot(accuracies, label=f"{label}: {accuracies[-1]:.4f}", **look)
    left.set(title="training loss of each global batch", xlabel="epoch", ylabel="cross entropy")
    right.set(title="accuracy on 360 digits never trained on", xlabel="epoch", ylim=(0, 1.02))
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


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
    fast = "(default: bf16 where the device has instructions for it)"
    add("--precision", choices=("bf16", "fp16", "no"), help=f"of autocast {fast}")
    add("--seed", type=int, default=0, help=f"of the first weights and the data order {default}")
    add("--device", help="such as cpu (default: an accelerator where there is one)")
    add("--out", type=Path, default=Path("runs/digits"), help=f"folder to write to {default}")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except KeyboardInterrupt:
        sys.exit("interrupted")
