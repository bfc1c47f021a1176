"""Train by the stages of DeepSpeed's ZeRO, save at one stage, and resume at another.

    pip install ".[deepspeed]"  # in a clone; the first start compiles C++, for minutes
    accel-fn launch -n 2 --cpu examples/deepspeed_zero.py
    python examples/deepspeed_zero.py  # one process: no DeepSpeed is needed

Every stage prints the losses of one process. Stage 1 shards the optimizer's state, stage 2 gradients
too, and stage 3 parameters too.
"""

import argparse
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af


def loss_fn(model, batch):
    points, inside = batch
    outputs = model(points)
    accuracy = (outputs.argmax(dim=1) == inside).float().mean()
    return F.cross_entropy(outputs, inside), {"accuracy": accuracy}


def train(stage, state, folder, num_epochs):
    """Train until so many epochs are done, from the newest checkpoint in the folder if there is one."""
    torch.manual_seed(0)
    points = torch.randn(1000, 2)
    data = TensorDataset(points, (points.norm(dim=1) < 1).long())
    loader = af.shard_loader(DataLoader(data, 64, shuffle=True), state)
    whole_loader = af.shard_loader(DataLoader(data, 250), state)
    model = nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Linear(128, 2))
    recipe = af.compose(af.place(), af.wrap_deepspeed(stage=stage), af.accumulate(2), af.clip(1.0))
    plan = af.Plan(loss_fn, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    state, step = af.build(recipe(plan), state)
    state = af.resume(step, state, folder, extras={"data": loader})
    for epoch in loader.epochs(num_epochs, since=state):
        for batch in epoch:
            state, _ = step(state, batch)
        found = af.evaluate(step, state, whole_loader, progress=False)
        figures = f"loss {found['loss']:.4f}  accuracy {found['accuracy']:.4f}"
        af.print_on_main(f"stage {stage}  epoch {epoch.index}  {figures}", state=state)
    af.save(step, state, folder, extras={"data": loader})


def main(args):
    warnings.simplefilter("ignore", FutureWarning)  # of DeepSpeed's collectives, one each
    state = af.init(seed=0)
    for stage in (1, 2, 3):
        train(stage, state, args.out / f"stage{stage}", num_epochs=2)
    train(1, state, args.out / "stage3", num_epochs=4)  # what stage 3 has saved


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train by the stages of DeepSpeed's ZeRO.")
    parser.add_argument("--out", type=Path, default=Path("runs/deepspeed_zero"))
    main(parser.parse_args())
