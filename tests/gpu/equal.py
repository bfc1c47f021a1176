"""Trains with every transform, alone and in pairs, on the device and on the CPU.

In half precision SGD takes AdamW's place: AdamW divides a gradient by its own size, so that the
rounding of one near zero, which is another on each device, moves a parameter by twice the rate.
"""

from __future__ import annotations

import itertools

import torch

import accel_fn as af
from tests.gpu.parts import (
    DEVICE,
    GUARDS,
    IS_REHEARSAL,
    TRANSFORMS,
    Stack,
    batches,
    distance,
    mse_and_mae,
    reason,
    whole,
)

EVERY = {
    **TRANSFORMS,
    "compiled": lambda: af.compiled(),
    "compiled(blocks)": lambda: af.compiled(scope="blocks"),
    "compiled(step)": lambda: af.compiled(scope="step"),
}
MORE = (("fsdp(offload)", "skip_nonfinite", "schedule"), ("fp16", "clip", "average"))
HALVES = {"fp16", "bf16"}
_TOLERANCE, _TOLERANCE_BF16 = 1e-3, 1e-2


def train(device, names, fused):
    model = Stack()
    if HALVES & {*names}:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    recipe = af.compose(af.place(), *[EVERY[name]() for name in names])
    plan = recipe(af.Plan(mse_and_mae, model, optimizer))
    state, step = af.build(plan, af.init(device=device))
    applied = []
    for number, (inputs, targets) in enumerate(batches(8)):
        if number == 4 and GUARDS & {*names}:
            inputs[0, 0] = torch.inf
        state, report = step(state, (inputs, targets))
        applied.append(report.applied)
    return whole(model), [*map(bool, applied)]


def compare(names, fused):
    expected, applied = train("cpu", names, fused)
    found, applied_there = train(DEVICE, names, fused)
    error = distance(expected, found)
    bound = _TOLERANCE_BF16 if "bf16" in names else _TOLERANCE
    same = error < bound and applied == applied_there
    return f"{error:.1e} {'' if same else 'DIFFERS'}"


def main():
    names = [*EVERY][:5] if IS_REHEARSAL else [*EVERY]
    every = [(), *[(name,) for name in names]]
    every += [] if IS_REHEARSAL else [*itertools.combinations(names, 2), *MORE]
    for fused, chosen in itertools.product((True, False), every):
        try:
            result = compare(chosen, fused)
        except Exception as error:
            result = reason(error)
        print(f"{'fused' if fused else 'foreach':8} {' + '.join(chosen):36} {result}", flush=True)


if __name__ == "__main__":
    main()
