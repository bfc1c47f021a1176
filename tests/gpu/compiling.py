"""Times compiled scopes and modes, whole and in micro-batches, against the eager step."""

from __future__ import annotations

import itertools
import time

import torch

import accel_fn as af
from tests.gpu.parts import (
    DEVICE,
    IS_REHEARSAL,
    Stack,
    batches,
    mse,
    peak_gib,
    reason,
    stepping,
    synchronize,
)

PARTS = {
    "whole": lambda: af.compose(),
    "accumulate(4)": lambda: af.accumulate(4),
    "reproducible(4)": lambda: af.reproducible(4),
}
SCOPES = ("loss", "blocks", "step")
MODES = ("default", "reduce-overhead", "max-autotune")
_NUM_STEPS, _WARM_UP = 30, 10


def run(*transforms):
    width = 64 if IS_REHEARSAL else 1024
    model = Stack(depth=6, width=width)
    plan = af.Plan(mse, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    recipe = af.compose(af.place(), af.clip(1.0), *transforms)
    step = stepping(plan, af.init(device=DEVICE), recipe)
    data = [tuple(each.to(DEVICE) for each in batch) for batch in batches(4, size=64, width=width)]
    losses = []
    for number in range(_NUM_STEPS):
        if number == _WARM_UP:
            synchronize()
            start = time.perf_counter()
        losses.append(step(data[number % 4]))
    synchronize()
    step_ms = (time.perf_counter() - start) / (_NUM_STEPS - _WARM_UP) * 1e3
    return [float(loss) for loss in losses], f"{step_ms:8.2f} ms  peak {peak_gib():.2f} GiB"


def compared(expected, *transforms):
    losses, cost = run(*transforms)
    error = max(abs(one - other) / other for one, other in zip(losses, expected, strict=True))
    return f"{cost}  relative error {error:.1e} {'' if error < 1e-2 else 'DIFFERS'}"


def main():
    scopes, modes = (SCOPES[:1], MODES[:1]) if IS_REHEARSAL else (SCOPES, MODES)
    for name, parts in PARTS.items():
        expected, cost = run(parts())
        print(f"{name:16} eager {'':18} {cost}", flush=True)
        for scope, mode in itertools.product(scopes, modes):
            try:
                result = compared(expected, parts(), af.compiled(scope=scope, mode=mode))
            except Exception as error:
                result = reason(error)
            print(f"{name:16} {scope:7} {mode:16} {result}", flush=True)


if __name__ == "__main__":
    main()
