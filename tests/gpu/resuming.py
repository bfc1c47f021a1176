"""Resumes on the device, saves in the background, and finds the micro-batches that fit in memory."""

from __future__ import annotations

import resource
import tempfile
import time

import torch

import accel_fn as af
from tests.gpu.parts import DEVICE, IS_REHEARSAL, gpt2, lm_loss, num_targets

_LIMIT_GIB = 12


def built(*transforms):
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    recipe = af.compose(
        af.place(),
        af.with_amp("bf16"),
        af.skip_nonfinite(),
        af.schedule(lambda num_updates: 0.99**num_updates),
        *transforms,
    )
    plan = recipe(af.Plan(lm_loss, model, optimizer, num_targets))
    return *af.build(plan, af.init(device=DEVICE)), model


def rows(number, size=8):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(512, (size, 128), generator=generator)


def resume(folder, wait):
    state, step, model = built()
    torch.manual_seed(7)  # of the dropout
    for number in range(4):
        state, _ = step(state, rows(number))
    start = time.perf_counter()
    af.save(step, state, folder, wait=wait)
    save_s = time.perf_counter() - start
    for number in range(4, 7):
        state, _ = step(state, rows(number))
    expected = [each.detach().clone() for each in model.parameters()]
    state, step, model = built()
    state = af.load(step, state, folder)
    for number in range(4, 7):
        state, _ = step(state, rows(number))
    same = all(map(torch.equal, expected, model.parameters()))
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"wait={wait}: save took {save_s:.2f} s, same bits: {same}, host peak {peak_mib} MiB")


def run_out_of_memory():
    if DEVICE == "cuda":
        total_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, _LIMIT_GIB / total_gib))
    state, step, _ = built(af.accumulate("auto"))
    for number in range(6):
        state, report = step(state, rows(number, 8 if IS_REHEARSAL else 256))
        print(f"auto: {dict(report.extras)} loss {float(report.loss):.4f}", flush=True)


def main():
    for wait in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            resume(folder, wait)
    run_out_of_memory()


if __name__ == "__main__":
    main()
