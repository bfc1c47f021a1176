"""Ends a run on two devices in one of five ways: ok, raise, skip, sleep, kill."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import accel_fn as af
from tests.gpu.parts import DEVICE

_BAD_RANK, _BAD_STEP = 1, 3


class Fails(torch.autograd.Function):
    """The identity, with a backward that raises once `now` is set."""

    now = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Fails.now:
            raise ValueError("the backward of rank 1 fails")
        return gradient


def loss_fn(model, batch):
    """Fail between the buckets of DDP, when some have left already."""
    return F.mse_loss(model[4:](Fails.apply(model[:4](batch[0]))), batch[1])


def go_wrong(case):
    Fails.now = case == "raise"
    if case == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "skip" or (case == "sleep" and DEVICE != "cuda"):
        time.sleep(1e6)  # the host is lost
    if case == "sleep":
        for _ in range(100):  # only the device is
            torch.cuda._sleep(2_000_000_000)


def main():
    case, state = sys.argv[1], af.init()
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))
    state, step = af.build(af.compose(af.place(), af.wrap_ddp(bucket_cap_mb=1))(plan), state)
    generator = torch.Generator().manual_seed(state.rank)
    for number in range(6):
        batch = tuple(torch.randn(8, 512, generator=generator) for _ in range(2))
        if number == _BAD_STEP and state.rank == _BAD_RANK:
            go_wrong(case)
        state, report = step(state, batch)
        line = f"rank {state.rank} step {number} loss {float(report.loss):.3f}\n"
        print(line, end="", flush=True)  # at once, since the ranks share a pipe


if __name__ == "__main__":
    main()
