"""A log on the device has the values of a run on the CPU, each line one step late."""

import gc

import pytest
import torch

import accel_fn as af
from accel_fn.core.delayed_read import DelayedRead
from tests.sim.programs import NUM_STEPS, train

COMPARED = ("loss", "grad_norm", "learning_rate", "skipped_updates", "mae")


def lines_of(device, *, every):
    """Return the lines of a run that skips an update, with the last one, which the end of a step writes."""
    lines = []
    recipe = [
        af.skip_nonfinite(),
        af.clip(0.5),
        af.schedule(lambda count: 1 / (count + 1)),
        af.log_to(lambda step, line: lines.append((step, line)), every=every),
    ]
    train(device, recipe, overflows=True)
    gc.collect()
    return lines


@pytest.mark.parametrize("every", [1, 2])
def test_lines_of_the_device_are_those_of_the_cpu(every):
    expected, found = lines_of("cpu", every=every), lines_of("sim", every=every)
    steps = list(range(every, NUM_STEPS + 1, every))
    assert [step for step, _ in expected] == [step for step, _ in found] == steps
    for (_, line), (_, line_of_device) in zip(expected, found, strict=True):
        assert line.keys() - {"peak_memory"} == line_of_device.keys() - {"peak_memory"}
        for name in COMPARED:
            # The rate of an update that may be skipped is a tensor in float32 there.
            tolerance = 1e-6 if name == "learning_rate" else 1e-7
            assert line_of_device[name] == pytest.approx(line[name], rel=tolerance, nan_ok=True)
    assert sum(line["skipped_updates"] for _, line in found) == 1


def test_a_value_that_does_not_come_is_given_up():
    value = torch.ones((), device="sim")
    read = DelayedRead()
    torch.sim._sleep(1_000_000_000)
    read(value + 1)
    assert read.last(timeout_s=0.05) is None
    torch.sim.synchronize()
    read(value + 1)
    torch.sim.synchronize()
    assert read.last(timeout_s=5.0) == 2
