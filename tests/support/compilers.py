"""Marks and helpers of tests that compile code: they are slow, and need a C++ compiler."""

import os
import shutil
from collections.abc import Callable

import pytest
import torch
from torch._dynamo.utils import counters

import accel_fn as af
from tests.support import strategies as ours

there = shutil.which(os.environ.get("CXX", "g++")) is not None
needs_compiler = pytest.mark.skipif(
    not there or " " in torch.__file__,  # torch splits the compiler's command at spaces
    reason="needs a C++ compiler, and torch installed below a path without a space",
)
MARKS = [pytest.mark.slow, needs_compiler]

# torch's compiler reads the gradients of tensors that have none, which warns.
looks_at_gradients = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)


def compiles(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test as one that compiles."""
    for mark in MARKS:
        test = mark(test)
    return test


def make_batches(*sizes):
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(size, 3, generator=generator).double(),
            torch.randn(size, 1, generator=generator).double(),
        )
        for size in sizes
    ]


def make_plan(model=None, optimizer=ours.adamw, loss_fn=ours.mse):
    model = model or ours.regression_model()
    return af.Plan(loss_fn, model, optimizer(model.parameters()))


def plain_sgd(parameters):
    """Make SGD without momentum: it has no state, so even its first update is compiled."""
    return torch.optim.SGD(parameters, lr=0.05)


def run(plan, batches):
    state, step = af.build(plan, af.DistState())
    reports = []
    for batch in batches:
        state, report = step(state, batch)
        reports.append(report)
    return state, step, reports


def num_graphs():
    return counters["stats"]["unique_graphs"]


def num_breaks():
    return sum(counters["graph_break"].values())
