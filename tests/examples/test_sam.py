"""examples/sam.py on one process and on two, and its step against the algorithm by hand."""

from __future__ import annotations

import pytest
import sam
import torch
import torch.nn.functional as F

import accel_fn as af
from tests.examples.running import Run, run_once

on_one = run_once("sam", "--epochs", "2", num_processes=1)
on_two = run_once("sam", "--epochs", "2", num_processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("training", ["plain", "sharpness-aware"])
def test_losses_are_the_same_on_two_processes_to_rounding(
    training: str, on_one: Run, on_two: Run
) -> None:
    one, two = (run.curves()[training]["loss"] for run in (on_one, on_two))
    assert len(one) == 24
    # Losses start at 2.4; sums of 1e5 terms in another order differ by some units in the last
    # place.
    assert one == pytest.approx(two, rel=0, abs=20 * torch.finfo(torch.float32).eps)


@pytest.mark.slow
def test_sharpness_aware_training_finds_a_flatter_place(on_one: Run) -> None:
    curves = on_one.curves()
    assert 0 < curves["sharpness-aware"]["sharpness"] < curves["plain"]["sharpness"]


def linear(inputs: torch.Tensor) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(inputs.shape[1], 3, dtype=inputs.dtype)


def mean_loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 6, 5, generator=generator, dtype=torch.float64)
    return list(zip(inputs, torch.randint(3, (4, 6), generator=generator), strict=True))


def train_by_hand(rho: float) -> torch.Tensor:
    """Train by algorithm 1 of Foret et al. 2021, without accel_fn."""
    data = batches()
    model = linear(data[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    parameters = list(model.parameters())
    for batch in data:
        gradients = torch.autograd.grad(mean_loss(model, batch), parameters)
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        before = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter += rho * gradient / norm
        mean_loss(model, batch).backward()
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach()


@pytest.mark.parametrize("rho", [0.0, 0.1, 2.0])
def test_step_is_the_algorithm_by_hand(rho: float) -> None:
    data = batches()
    model = linear(data[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state, step = af.build(af.Plan(mean_loss, model, optimizer), af.DistState())
    sharpness_aware_step = sam.sharpness_aware(step, rho)
    for batch in data:
        state, _ = sharpness_aware_step(state, batch)
    assert state.step == len(data)
    torch.testing.assert_close(model.weight.detach(), train_by_hand(rho), rtol=1e-10, atol=1e-10)


def test_parameters_come_back_bit_by_bit_even_after_an_error() -> None:
    model = torch.nn.Linear(4, 3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    grads = af.Grads(tuple(torch.randn_like(parameter) for parameter in model.parameters()))

    def look_and_fail() -> None:
        with sam.uphill(model, grads, rho=0.3):
            assert not any(map(torch.equal, before, model.parameters()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        look_and_fail()
    assert all(map(torch.equal, before, model.parameters()))
