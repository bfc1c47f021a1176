"""Trains GPT-2 124M in bf16 with torch alone, with accelerate, and with accel_fn."""

from __future__ import annotations

import gc

import torch

import accel_fn as af
from tests.gpu.parts import (
    DEVICE,
    IS_REHEARSAL,
    by_hand,
    gpt2,
    lm_batches,
    lm_loss,
    measured,
    num_targets,
    reason,
    stepping,
)


def parts():
    model = gpt2()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def by_torch(*, compiles=False, num_microbatches=1):
    model, optimizer = parts()
    model.to(DEVICE)
    forward = torch.compile(model) if compiles else model
    return by_hand(forward, model, optimizer, DEVICE, num_microbatches)


def by_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=IS_REHEARSAL)
    model, optimizer = accelerator.prepare(*parts())

    def step(tokens):
        loss = lm_loss(model, tokens.to(DEVICE, non_blocking=True))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ours(*transforms):
    recipe = af.compose(af.place(), af.with_amp("bf16"), af.clip(1.0), *transforms)
    return stepping(af.Plan(lm_loss, *parts(), num_targets), af.init(device=DEVICE), recipe)


def guarded():
    falling = af.schedule(lambda num_updates: 0.99**num_updates)
    return ours(af.skip_nonfinite(), falling, af.ema(0.999))


RUNS = {
    "torch": by_torch,
    "accelerate": by_accelerate,
    "accel_fn": ours,
    "accel_fn, guards and average": guarded,
    "torch, compiled": lambda: by_torch(compiles=True),
    "accel_fn, compiled loss": lambda: ours(af.compiled()),
    "accel_fn, compiled blocks": lambda: ours(af.compiled(scope="blocks")),
    "accel_fn, compiled step": lambda: ours(af.compiled(scope="step")),
    "torch, compiled, 4 parts": lambda: by_torch(compiles=True, num_microbatches=4),
    "accel_fn, compiled loss, 4 parts": lambda: ours(af.compiled(), af.accumulate(4)),
    "accel_fn, compiled step, 4 parts": lambda: ours(af.compiled(scope="step"), af.accumulate(4)),
}


def main():
    torch.set_float32_matmul_precision("high")
    data = lm_batches(8)
    names = [name for name in RUNS if not (IS_REHEARSAL and "compiled" in name)]
    for name in (*names, "torch", "accel_fn"):  # twice, to see how much the clock drifts
        gc.collect()  # the model before this one
        try:
            result = measured(RUNS[name](), data)
        except Exception as error:
            result = reason(error)
        print(f"{name:33} {result}", flush=True)


if __name__ == "__main__":
    main()
