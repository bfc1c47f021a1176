"""Write one log to a JSON file, to TensorBoard and to W&B, and compare what they stored.

    python examples/trackers.py
    accel-fn launch -n 2 --cpu examples/trackers.py
    tensorboard --logdir runs/trackers

TensorBoard needs `pip install tensorboard`. W&B is used where it is installed: offline, so without
an account. `wandb sync runs/trackers/wandb/offline-run-*` uploads the run later.
"""

import argparse
import importlib.util
import json
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.tensorboard import SummaryWriter

import accel_fn as af

SHOWN = "loss", "test/loss", "test/accuracy"


def loss_fn(model, batch):
    images, labels = batch
    outputs = model(images)
    accuracy = (outputs.argmax(dim=1) == labels).float().mean()
    return F.cross_entropy(outputs, labels), {"accuracy": accuracy}


def start_trackers(folder):
    """A run of each tracker that is installed."""
    runs = [SummaryWriter(folder / "tensorboard")]
    if importlib.util.find_spec("wandb"):
        import wandb

        runs.append(wandb.init(project="digits", dir=str(folder), mode="offline"))
    return runs


def read_file(path):
    """The values of each step, by name."""
    found = defaultdict(dict)
    for line in map(json.loads, path.read_text().splitlines()):
        found[line["step"]].update(line)
    return found


def read_tensorboard(folder):
    """The same from the files of TensorBoard."""
    events = EventAccumulator(str(folder)).Reload()
    found = defaultdict(dict)
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found[event.step][name] = event.value
    return found


def main(args):
    state = af.init()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    train_data, test_data = random_split(data, [1437, 360])
    loader = af.shard_loader(DataLoader(train_data, 64, shuffle=True), state)
    test_loader = af.shard_loader(DataLoader(test_data, 180), state)

    runs = start_trackers(args.out) if state.is_main else []  # the main rank writes
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    recipe = af.compose(
        af.place(),
        af.wrap_ddp(),
        af.clip(1.0),
        af.log_to(args.out / "log.jsonl", *runs, every=len(loader)),
    )
    plan = af.Plan(loss_fn, model, torch.optim.AdamW(model.parameters(), lr=5e-3))
    state, step = af.build(recipe(plan), state)
    for epoch in loader.epochs(args.epochs):
        for batch in epoch:
            state, _ = step(state, batch)
        found = af.evaluate(step, state, test_loader, progress=False)
        af.log_values(step, state, found, prefix="test/")

    if state.is_main:
        runs[0].flush()
        in_file = read_file(args.out / "log.jsonl")
        in_tensorboard = read_tensorboard(args.out / "tensorboard")
        for place, stored in (("log.jsonl", in_file), ("TensorBoard", in_tensorboard)):
            for number, values in stored.items():
                figures = (f"{name} {values[name]:.4f}" for name in SHOWN)
                print(f"{place:11}  step {number}", *figures, sep="  ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Log to a file and to trackers.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/trackers"))
    main(parser.parse_args())
