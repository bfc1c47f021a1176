"""The behaviour of accelerate in the rows of docs/differences.md, as its column "measured" states it.

Each row is a function that trains with accelerate as its guides show it, and returns these words
with the figures that it found.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.support import strategies as ours

Measure = Callable[[], str]
ROWS: dict[int, Measure] = {}
NUM_RANKS: dict[int, int] = {}


def row(number: int, *, num_ranks: int = 2) -> Callable[[Measure], Measure]:
    """Register the function that measures a row of the page."""

    def register(measure: Measure) -> Measure:
        ROWS[number], NUM_RANKS[number] = measure, num_ranks
        return measure

    return register


def measured(num_ranks: int) -> dict[int, str]:
    """Measure all rows for a number of ranks; every rank of a world calls it."""
    found = {}
    for number in sorted(each for each, count in NUM_RANKS.items() if count == num_ranks):
        torch.manual_seed(number)
        try:
            found[number] = ROWS[number]()
        except Exception as error:
            found[number] = f"{type(error).__name__}: {error}"
    return found


def fresh(**options: Any) -> Accelerator:
    """Make an Accelerator without the state of earlier ones, as in a new process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def rank() -> int:
    return dist.get_rank()


def everywhere(value: Any) -> list[Any]:
    """Return the value of each rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def of_all_ranks(tensors: list[Tensor]) -> list[int]:
    """Return the numbers of all ranks, one rank after another."""
    return [number for mine in everywhere(torch.cat(tensors).tolist()) for number in mine]


@contextmanager
def shared_folder() -> Iterator[str]:
    """Make a folder that all ranks see and leave together."""
    with tempfile.TemporaryDirectory() as mine:
        yield everywhere(mine)[0]
        dist.barrier()


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 3, generator=generator).double()
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True) ** 2)


def linear() -> nn.Module:
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    return model


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def gradient_by_hand(batch: Any, model: nn.Module | None = None, loss_fn: Any = ours.mse) -> Tensor:
    """Return the gradient of the mean over a whole batch, on one process."""
    model = linear() if model is None else model
    loss_fn(model, batch).backward()
    return gradient(model)


def off(found: Tensor, right: Tensor) -> float:
    """Return the relative error."""
    return float((found - right).norm() / right.norm())


def ratio(found: Tensor, right: Tensor) -> float:
    """Return the factor between two tensors that differ by nothing else."""
    factor = float((found @ right) / (right @ right))
    return factor if off(found, factor * right) < 1e-9 else math.nan


def checkpoint(folder: str, number: int) -> Path:
    """Return the path of a checkpoint under accelerate's automatic names."""
    return Path(folder) / "checkpoints" / f"checkpoint_{number}"
