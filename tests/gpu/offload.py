"""Trains with parameters on the host while the device is kept busy: do its values arrive in time?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import accel_fn as af
from tests.gpu.parts import DEVICE, Stack, batches, keep_busy, mse

RECIPES = {
    "fp16": lambda: af.with_amp("fp16", init_scale=2.0**10),
    "skip_nonfinite + schedule": lambda: af.compose(
        af.skip_nonfinite(), af.schedule(lambda num_updates: 0.9**num_updates)
    ),
    "skip_nonfinite + skip_spikes": lambda: af.compose(af.skip_nonfinite(), af.skip_spikes()),
}


def accept_late(state, grads):
    """Accept every update, once a busy device comes to it."""
    keep_busy()
    return torch.ones((), dtype=torch.bool, device=state.device)


def run(recipe, fused):
    model = Stack(depth=4, width=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    plan = af.compose(af.place(), af.wrap_fsdp(offload=True), recipe)(
        af.Plan(mse, model, optimizer)
    )
    plan = replace(plan, accept=(*plan.accept, accept_late))
    state, step = af.build(plan, af.init(device=DEVICE))
    found = []
    for number, (inputs, targets) in enumerate(batches(12, size=16, width=256)):
        if number == 5:
            inputs[0, 0] = torch.inf
        state, report = step(state, (inputs, targets))
        found.append((float(report.loss), bool(report.applied)))
    return found


def agree(first, second):
    """Equal verdicts, and losses to the rounding of two kernels in half precision."""
    pairs = zip(first, second, strict=True)
    return all(
        one[1] == other[1] and (one[0] == pytest.approx(other[0], rel=0.01, nan_ok=True))
        for one, other in pairs
    )


def main():
    for name, recipe in RECIPES.items():
        fused, foreach = run(recipe(), True), run(recipe(), False)
        shown = (
            "the same"
            if agree(fused, foreach)
            else f"DIFFERS\n  fused   {fused}\n  foreach {foreach}"
        )
        print(f"{name:32} {shown}", flush=True)


if __name__ == "__main__":
    main()
