"""compiled(scope="step") on the device: which numbers its graph computes for each element."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

import accel_fn as af
from tests.sim.programs import OPTIMIZERS, assert_equal, train
from tests.support.compilers import looks_at_gradients

pytestmark = looks_at_gradients

COMPILE = torch.compile
POWERS = (torch.ops.aten.pow.Scalar, torch.ops.aten.pow.Tensor_Tensor)
"""Powers whose exponent is a tensor, as a step count is."""
ALL = [
    af.accumulate(2),
    af.clip(0.1),
    af.with_amp("fp16", init_scale=2.0**10),
    af.schedule(lambda num_updates: 0.9**num_updates),
]
PROGRAMS = [("AdamW", []), ("NAdam", []), ("RAdam", []), ("Adamax", []), ("AdamW", ALL)]

GRAPHS = []


def keep(module, _):
    GRAPHS.append(module.graph)
    return module.forward


AS_THEY_ARE = aot_autograd(fw_compiler=keep)
"""A back end that runs the graphs that a compiler gets: torch has no compiler for the device."""


@functools.wraps(COMPILE)  # whose parameters `compiled` looks at
def compile_graph(fn, *, options=None, backend=AS_THEY_ARE, **settings):
    return COMPILE(fn, backend=backend, **settings)


def elements(node):
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def is_double(node):
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.float64


@pytest.mark.parametrize(("kind", "transforms"), PROGRAMS)
def test_bias_corrections_are_float32_numbers_and_the_step_is_the_eager_one(
    monkeypatch, kind, transforms
):
    """A compiler for GPUs writes them into each loop over elements, where float64 is slow."""
    monkeypatch.setattr(torch, "compile", compile_graph)
    make = getattr(torch.optim, kind)
    monkeypatch.setitem(OPTIMIZERS, kind, lambda p: make(p, lr=0.01, capturable=True))
    options = {"optimizer": kind, "dtype": torch.float32}
    plain = train("sim", transforms, **options)
    found = train("sim", [*transforms, af.compiled(scope="step")], **options)
    assert_equal(found, plain, atol=1e-6)
    nodes = GRAPHS[-1].nodes
    powers = [node for node in nodes if node.target in POWERS]
    assert powers
    assert {elements(node) for node in powers} == {1}
    # Sums of losses and metrics are float64, of at most two micro-batches.
    readers = [user for node in nodes if is_double(node) for user in node.users]
    in_loops = [node for node in readers if elements(node) > 2]
    assert in_loops == []
