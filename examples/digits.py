"""Train a small CNN on 1,797 real handwritten digits, on one process or on several.

    python examples/digits.py --out runs/digits/1
    accel-fn launch -n 2 --cpu examples/digits.py --out runs/digits/2
    accel-fn launch -n 3 --cpu examples/digits.py --out runs/digits/3
    accel-fn plot runs/digits/1 runs/digits/2 runs/digits/3

All see the same batches and follow the same loss curve, up to rounding: in the picture, the curves
lie on each other.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

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

    torch.manual_seed(args.seed)
    model = build_model()
    recipe = af.compose(
        af.place(),
        af.wrap_ddp(),
        af.with_amp(args.precision or fast_precision(state.device)),
        af.accumulate(args.num_microbatches),
        af.clip(1.0),
        af.log_to(args.out / "log.jsonl", every=1),
    )
    optimizer = build_optimizer(args.optimizer, model, args.lr)
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state)

    train_data, test_data = load_data()
    loader = af.shard_loader(DataLoader(train_data, args.batch_size, shuffle=True), state)
    test_loader = af.shard_loader(DataLoader(test_data, args.batch_size), state)

    accuracy = log_accuracy(step, test_loader, state)
    for epoch in af.progress(loader.epochs(args.epochs, since=state), state):
        for batch in epoch:
            state, report = step(state, batch)
            epoch.show(report)
        accuracy = log_accuracy(step, test_loader, state)
        epoch.show(accuracy=accuracy)

    if state.is_main:
        save_file(model.state_dict(), args.out / "model.safetensors")
        print(f"test accuracy {accuracy:.4f} on {len(test_data)} digits never trained on")
        print(f"written to {args.out}: model.safetensors, log.jsonl")
        print(f"accel-fn plot {args.out} draws the curves")


def fast_precision(device: torch.device) -> str:
    """bf16 where the device has instructions for it; emulated, it takes longer than float32."""
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


def log_accuracy(step: af.Step, loader: Any, state: af.DistState) -> Any:
    """Log the share of right answers over all ranks, and return it."""
    found = af.evaluate(step, state, loader, is_right, progress=False)
    af.log_values(step, state, found, prefix="test/")
    return found["accuracy"]


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
