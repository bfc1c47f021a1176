"""One training program on any device: what is compared between the CPU and the simulated device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import accel_fn as af
from tests.gpu.parts import Block
from tests.gpu.parts import mse_and_mae as loss_fn
from tests.sim.device import Seen, native, recorded

Transform = Callable[[af.Plan], af.Plan]
NUM_STEPS, STEADY = 6, 4
"""Steps of a run, and how many of them, at its end, are steady."""
OVERFLOW = 3
"""The step whose batch is infinite, where updates may be skipped."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList([Block(6), Block(6)])

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.first(inputs)
        for block in self.blocks:
            inputs = block(inputs)
        return self.last(inputs)


def make_model(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def make_batches(number: int = NUM_STEPS, dtype: torch.dtype = torch.float64) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(8, 4, generator=draw, dtype=dtype),
            torch.randn(8, 1, generator=draw, dtype=dtype),
        )
        for _ in range(number)
    ]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
}


@dataclass(frozen=True)
class Run:
    losses: list[float]
    applied: list[bool]
    parameters: dict[str, Tensor]
    rate: float
    waits: Counter[str] = field(default_factory=Counter)
    """Of the steady steps together: how often each file of accel_fn made the host wait."""
    hazards: list[str] = field(default_factory=list)
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Of the last report."""


def whole(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    if isinstance(parameter, torch.distributed.tensor.DTensor):
        parameter = parameter.full_tensor()
    return parameter.cpu().clone()


def train(
    device: str | af.DistState,
    transforms: list[Transform],
    *,
    optimizer: str = "fused",
    dtype: torch.dtype = torch.float64,
    overflows: bool = False,
    loss: Callable[[Any, Any], Any] = loss_fn,
) -> Run:
    """Train for some steps from batches in pinned memory, or on the CPU."""
    state = af.init(device=device) if isinstance(device, str) else device
    model = make_model(dtype)
    plan = af.Plan(loss, model, OPTIMIZERS[optimizer](model.parameters()))
    state, step = af.build(af.compose(af.place(), *transforms)(plan), state)
    batches = make_batches(dtype=dtype)
    if overflows:
        batches[OVERFLOW][0][0, 0] = torch.inf
    reports, waits, hazards = [], Counter[str](), []
    for number, batch in enumerate(batches):
        if state.device.type != "cpu":
            batch = tuple(each.pin_memory() for each in batch)
        before = native.num_kernels()
        with recorded() as seen:
            state, report = step(state, batch)
        if number >= NUM_STEPS - STEADY:
            waits.update(waits_in(seen, since=before))
        hazards += [each.what for each in seen if each.kind == "hazard"]
        reports.append(report)
    return Run(
        losses=[float(report.loss) for report in reports],
        applied=[bool(report.applied) for report in reports],
        parameters={name: whole(each) for name, each in model.named_parameters()},
        rate=float(plan.optimizer.param_groups[0]["lr"]),
        waits=waits,
        hazards=hazards,
        extras=reports[-1].extras,
    )


def waits_in(seen: list[Seen], *, since: int) -> Counter[str]:
    """Count the waits by place; an event from before a step began, at kernel `since`, is no wait."""
    return Counter(
        each.place
        for each in seen
        if each.kind in ("sync", "copy") or (each.kind == "event" and each.until > since)
    )


def assert_equal(run: Run, expected: Run, *, atol: float) -> None:
    """Compare losses, verdicts, the rate and parameters."""
    assert run.applied == expected.applied
    torch.testing.assert_close(run.rate, expected.rate, rtol=1e-6, atol=0)
    torch.testing.assert_close(run.losses, expected.losses, rtol=0, atol=atol, equal_nan=True)
    torch.testing.assert_close(run.parameters, expected.parameters, rtol=0, atol=atol)
