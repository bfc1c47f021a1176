"""Draws docs/_static/run.png and run-dark.png: the logs of two runs, one killed and resumed.

`python docs/draw_run.py` trains and writes them anew.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.style
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from accel_fn.contrib.runs.plot_png import write_png
from accel_fn.contrib.runs.run_log import read_runs

PICTURES = Path(__file__).parent / "_static"
DARK = ["dark_background", {"figure.facecolor": "#131416", "axes.facecolor": "#131416"}]
"""The style of the dark theme, on the background of the pages."""
NUM_EPOCHS, NUM_SAMPLES, BATCH_SIZE = 12, 8192, 128
RUNS = {"lr=0.003": [], "lr=0.03": [200, 455]}
"""By learning rate, the steps after which the process of a run is killed."""


def loss_fn(model, batch):
    """Cross-entropy, and accuracy beside it."""
    inputs, targets = batch
    logits = model(inputs)
    return F.cross_entropy(logits, targets), {
        "accuracy": (logits.argmax(1) == targets).double().mean()
    }


def data():
    """Points on four spirals."""
    draw = torch.Generator().manual_seed(0)
    radius = torch.rand(NUM_SAMPLES, generator=draw)
    arm = torch.randint(4, (NUM_SAMPLES,), generator=draw)
    noise = 0.15 * torch.randn(NUM_SAMPLES, generator=draw)
    angle = 4 * radius + arm * torch.pi / 2 + noise
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    cut = NUM_SAMPLES - 512
    return TensorDataset(points[:cut], arm[:cut]), TensorDataset(points[cut:], arm[cut:])


def train(folder: str, rate: float, killed_after: int) -> None:
    """One process of a run."""
    state = af.init()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    training, held_out = data()
    loader = af.shard_loader(DataLoader(training, BATCH_SIZE, shuffle=True), state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    total = NUM_EPOCHS * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=total)
    recipe = af.compose(
        af.clip(1.0), af.schedule(schedule), af.log_to(f"{folder}/log.jsonl", every=10)
    )
    state, step = af.build(recipe(af.Plan(loss_fn, model, optimizer)), state)
    state = af.resume(step, state, f"{folder}/checkpoints", {"data": loader})
    for epoch in loader.epochs(NUM_EPOCHS, since=state):
        for batch in epoch:
            state, _ = step(state, batch)
            if state.step == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
        found = af.evaluate(step, state, DataLoader(held_out, 256))
        af.log_values(step, state, found, prefix="validation/")
        af.save(step, state, f"{folder}/checkpoints", extras={"data": loader}, keep=1)


def draw() -> None:
    """Run all processes, plot their logs, and print where the time of the killed run went."""
    with TemporaryDirectory() as home, contextlib.chdir(home):
        for name, kills in RUNS.items():
            for step in [*kills, 0]:
                command = [sys.executable, __file__, name, name.removeprefix("lr="), str(step)]
                subprocess.run(command, check=not step)
        runs, _ = read_runs("plot", [Path(name) for name in RUNS])
        for name, style in {"run": [], "run-dark": DARK}.items():
            with matplotlib.style.context(style):
                write_png(runs, picture := PICTURES / f"{name}.png")
            with Image.open(picture) as drawn:
                drawn.quantize(64).save(picture, optimize=True)
        report = [sys.executable, "-m", "accel_fn", "report", list(RUNS)[-1]]
        subprocess.run(report, check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
    else:
        draw()
