"""Find the phase and the rank that a run waits for.

    accel-fn launch -n 2 --cpu examples/profiling.py
    accel-fn launch -n 2 --cpu examples/profiling.py --slow-ms 0

The data of the last rank take longer to load. The profile of steps 21 to 25 names that rank, and the
time that the others wait for it. Open the traces in runs/profiling in ui.perfetto.dev.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, default_collate

import accel_fn as af


def loss_fn(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def main(args):
    state = af.init(seed=0)
    torch.manual_seed(0)
    is_slow = state.rank == state.world_size - 1

    def collate(samples):
        time.sleep(args.slow_ms / 1000 if is_slow else 0)  # a slow disk, or a long document
        return default_collate(samples)

    inputs = torch.randn(2048, 256)
    data = [*zip(inputs, inputs.square().mean(dim=1, keepdim=True), strict=True)]
    loader = DataLoader(data, batch_size=64, shuffle=True, collate_fn=collate)
    loader = af.shard_loader(loader, state)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 1))
    recipe = af.compose(
        af.place(),
        af.wrap_ddp(),
        af.accumulate(2),
        af.clip(1.0),
        af.profile(args.out, steps=range(21, 26)),
    )
    plan = af.Plan(loss_fn, model, torch.optim.AdamW(model.parameters()))
    state, step = af.build(recipe(plan), state)
    for batch in loader:
        state, report = step(state, batch)
    af.print_on_main(f"loss {report.loss:.4f}", state=state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Find the phase and the rank a run waits for.")
    parser.add_argument("--slow-ms", type=float, default=50, help="of each batch of the last rank")
    parser.add_argument("--out", type=Path, default=Path("runs/profiling"))
    main(parser.parse_args())
