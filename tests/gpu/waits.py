"""Counts how often a step makes the host wait, by the line of accel_fn, from CUDA's own warnings."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import accel_fn as af
from tests.gpu.parts import DEVICE, IS_REHEARSAL, Stack, batches, mse_and_mae, pinned, reason

_NUM_STEPS, _WARM_UP = 8, 3


@contextmanager
def counted(waits):
    def count(text, *args, **settings):
        if "synchroniz" in str(text):
            frames = [each for each in traceback.extract_stack() if "/accel_fn/" in each.filename]
            place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "torch"
            waits[place] += 1

    if DEVICE != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def waits_of(plan, recipe, data):
    state, step = af.build(af.compose(af.place(), recipe)(plan), af.init(), check_loss=False)
    waits, data = Counter(), iter(data)
    for _ in range(_WARM_UP):
        state, _ = step(state, next(data))
    with counted(waits):
        for batch in data:
            state, _ = step(state, batch)
    return {place: number / (_NUM_STEPS - _WARM_UP) for place, number in waits.items()}


def plan_of(fused):
    model = Stack(depth=6)
    return af.Plan(mse_and_mae, model, torch.optim.AdamW(model.parameters(), fused=fused))


def falling():
    return af.schedule(lambda num_updates: 0.99**num_updates)


RECIPES = {
    "nothing": lambda: af.compose(),
    "clip": lambda: af.clip(1.0),
    "clip + log_to": lambda: af.compose(
        af.clip(1.0), af.log_to(lambda step, values: None, every=1)
    ),
    "clip_value": lambda: af.clip_value(0.1),
    "fp16 + schedule": lambda: af.compose(af.with_amp("fp16"), falling()),
    "skip_nonfinite + skip_spikes + 2 schedules + average": lambda: af.compose(
        af.skip_nonfinite(), af.skip_spikes(), by_scheduler, by_scheduler, af.ema(0.9)
    ),
    "accumulate(4)": lambda: af.accumulate(4),
    "checkpoint": lambda: af.checkpoint_activations(blocks="blocks"),
    "checkpoint, offload (a wait a block)": lambda: af.checkpoint_activations(
        blocks="blocks", offload=True
    ),
    "reproducible (1: metrics)": lambda: af.reproducible(2),
    "compiled step + accumulate(4)": lambda: af.compose(
        af.compiled(scope="step"), af.accumulate(4)
    ),
    "fsdp, offload": lambda: af.wrap_fsdp(offload=True, blocks="blocks"),
}


def by_scheduler(plan):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plan.optimizer, 0.99)
    return af.schedule(scheduler)(plan)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(512, 64), nn.Linear(64, 512)

    def forward(self, tokens):
        return self.head(self.table(tokens))


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def waits_of_labels(prefetched):
    model = Tokens()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    plan = af.Plan(cross_entropy, model, optimizer, af.count_labels("y"))
    data = [
        {name: pinned(torch.randint(512, (8, 32))) for name in ("x", "y")}
        for _ in range(_NUM_STEPS)
    ]
    given = af.prefetch(data, af.init()) if prefetched else data
    return waits_of(plan, af.accumulate(4), given)


def main():
    if DEVICE != "cuda":
        print("CUDA alone reports waits; this shows only that the program runs")
    data = [tuple(map(pinned, batch)) for batch in batches(_NUM_STEPS)]
    for fused in (True, False):
        for name, recipe in RECIPES.items():
            if IS_REHEARSAL and "compiled" in name:
                continue
            try:
                found = waits_of(plan_of(fused), recipe(), data)
            except Exception as error:
                found = reason(error)
            print(f"{'fused' if fused else 'foreach':8} {name:54} {found}", flush=True)
    for prefetched in (False, True):
        print(f"num_labels, prefetch={prefetched}: {waits_of_labels(prefetched)}", flush=True)


if __name__ == "__main__":
    main()
