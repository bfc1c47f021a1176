"""`python -m tests.tools.benchmarks.growing`: how the calls of a step grow with tensors, micro-batches and
metrics, and the host's work on a message with the number of ranks."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # must be set before torch is imported

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accel_fn as af
from accel_fn.testing.internals import reading_from
from tests.tools.benchmarks.conditions import settle
from tests.tools.benchmarks.counting import Update, count

WARM_UP = 12
RANKS = (2, 8, 64, 512, 1024, 8192)


class Many(nn.Module):
    """A model of many small parameters, all in one product."""

    def __init__(self, num_tensors: int) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(num_tensors)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(tuple(self.rows)).mul(x).square().mean()


def loss_of_many(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch.mean(0))
    return loss


def many_by_hand(num_tensors: int) -> Update:
    model, batch = Many(num_tensors), torch.randn(16, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def update(index: int) -> None:
        loss_of_many(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def many(num_tensors: int, *transforms: af.Transform) -> Update:
    model = Many(num_tensors)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return stepping(af.Plan(loss_of_many, model, optimizer), torch.randn(16, 8), *transforms)


def stepping(plan: af.Plan[Any], batch: Any, *transforms: af.Transform) -> Update:
    state, step = af.build(af.compose(*transforms)(plan), af.DistState())

    def update(index: int) -> None:
        nonlocal state
        state, _ = step(state, batch)

    return update


def with_metrics(num_metrics: int, num_parts: int) -> Update:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss = F.mse_loss(model(batch[0]), batch[1])
        return loss, {f"metric {index}": loss.detach() for index in range(num_metrics)}

    model = nn.Linear(8, 1)
    plan = af.Plan(loss_fn, model, torch.optim.AdamW(model.parameters(), fused=True))
    return stepping(plan, (torch.randn(64, 8), torch.randn(64, 1)), af.accumulate(num_parts))


def calls_of(update: Update) -> float:
    return count(update, warm_up=WARM_UP).calls


def slope(make: Callable[[int], Update], few: int, more: int) -> float:
    """Return the Python calls of an update that one more unit adds."""
    return (calls_of(make(more)) - calls_of(make(few))) / (more - few)


SLOPES: dict[str, Callable[[], float]] = {
    "a tensor, by hand": lambda: slope(many_by_hand, 10, 210),
    "a tensor": lambda: slope(many, 10, 210),
    "a tensor, with clip": lambda: slope(lambda n: many(n, af.clip(1.0)), 10, 210),
    "a tensor, with ema": lambda: slope(lambda n: many(n, af.ema(0.99)), 10, 210),
    "a micro-batch": lambda: slope(lambda k: with_metrics(0, k), 2, 32),
    "a metric": lambda: slope(lambda n: with_metrics(n, 1), 10, 110),
    "a metric in each of 8 micro-batches": lambda: slope(lambda n: with_metrics(n, 8), 10, 110),
}


def main() -> int:
    settle()
    print("| one more | Python calls of a step |\n|---|---|")
    for name, measure in SLOPES.items():
        print(f"| {name} | {measure():.1f} |", flush=True)
    print("\n| ranks | host time of a message |\n|---|---|")
    for num_ranks in RANKS:
        read, took = reading_from(num_ranks), []
        for _ in range(9):
            began = time.process_time()
            for _ in range(40):
                read()
            took.append((time.process_time() - began) / 40)
        print(f"| {num_ranks:,} | {min(took) * 1e6:,.0f} us |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
