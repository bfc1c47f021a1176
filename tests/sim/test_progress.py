"""A bar over a loop on the device: each line has the value of the step before, and waits for no later one."""

import re

import torch

import accel_fn as af
from tests.sim.device import native, recorded
from tests.sim.programs import waits_in
from tests.support.screen import on_screen


def test_a_line_shows_the_value_of_the_step_before_and_the_last_line_that_of_the_last():
    waits, before = [], 0
    with on_screen() as screen, recorded() as seen:
        bar = af.progress(range(4), af.DistState(device="sim"))
        value = torch.full((), 4.0, device="sim")
        for _ in bar:
            waits.append(waits_in(seen, since=before))
            seen.clear()
            before = native.num_kernels()
            torch.sim._sleep(1_000_000)
            value = value - 1
            bar.show(value=value)
        shown = re.findall(r"value=(\w+)", screen.getvalue())
    assert not any(waits)
    assert list(dict.fromkeys(shown)) == ["3", "2", "1", "0"]
    assert not [each for each in seen if each.kind == "hazard"]
