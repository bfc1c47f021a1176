"""examples/gan.py on one process and on two, and its two steps."""

from __future__ import annotations

import re
from functools import partial

import gan
import pytest
import torch

import accel_fn as af
from tests.examples.running import Run, run_once

NUM_BATCHES = 141  # ten passes over 1,797 digits, 128 at a time


on_one = run_once("gan", "--passes", "10", num_processes=1)
on_two = run_once("gan", "--passes", "10", num_processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["discriminator", "generator"])
def test_losses_are_the_same_on_two_processes_to_rounding(
    network: str, on_one: Run, on_two: Run
) -> None:
    one, two = on_one.curves()[network], on_two.curves()[network]
    assert len(one) == NUM_BATCHES
    # Losses are near one; sums of 1e4 terms in another order differ by some units in the last
    # place.
    assert one[:20] == pytest.approx(two[:20], rel=0, abs=20 * torch.finfo(torch.float32).eps)
    # Adam divides by the size of a gradient, so rounding shows where a gradient is nearly zero.
    assert one == pytest.approx(two, rel=0, abs=1e-3)


def test_drawn_digits_come_close_to_real_ones(any_run: Run) -> None:
    (fitting,) = re.findall(r"([\d.]+)% are nearest", any_run.stdout[0])
    drawn, real, shuffled = map(float, re.findall(r"(\d\.\d\d) ", any_run.stdout[0]))
    assert float(fitting) > 40  # 10 by chance, 95 after all forty passes
    assert drawn < (real + shuffled) / 2


def test_noise_of_a_sample_is_its_own() -> None:
    data = gan.DigitsWithNoise(num_passes=2)
    image, label, noise = data[5]
    again, same_label, other_noise = data[5 + 1797]
    assert torch.equal(image, again)
    assert label == same_label
    assert torch.equal(noise, data[5][2])
    assert not torch.equal(noise, other_noise)


def test_generator_step_leaves_the_discriminator_alone() -> None:
    generator, discriminator = gan.Network(16, 64), gan.Network(64, 1)
    g_loss = partial(gan.generator_loss, discriminator=discriminator)
    d_loss = partial(gan.discriminator_loss, generator=generator)
    state, step = af.build(af.Plan(g_loss, generator, gan.adam(generator)), af.DistState())
    _other = af.build(af.Plan(d_loss, discriminator, gan.adam(discriminator)), af.DistState())
    before = [parameter.detach().clone() for parameter in discriminator.parameters()]
    batch = (torch.rand(6, 64), torch.arange(6), torch.randn(6, 16))
    _, report = step(state, batch)
    assert report.applied
    assert all(parameter.grad is None for parameter in discriminator.parameters())
    assert all(map(torch.equal, before, discriminator.parameters()))


def test_two_updates_of_one_batch_count_once() -> None:
    generator, discriminator = gan.Network(16, 64), gan.Network(64, 1)
    g_loss = partial(gan.generator_loss, discriminator=discriminator)
    d_loss = partial(gan.discriminator_loss, generator=generator)
    state = af.DistState()
    state, d_step = af.build(af.Plan(d_loss, discriminator, gan.adam(discriminator)), state)
    state, g_step = af.build(af.Plan(g_loss, generator, gan.adam(generator)), state)
    batch = (torch.rand(6, 64), torch.arange(6), torch.randn(6, 16))
    state, _ = d_step(state, batch, advance=False)
    state, _ = g_step(state, batch)
    assert state.step == 1
