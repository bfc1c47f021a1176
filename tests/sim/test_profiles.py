"""profile on the device: the same step, whose only wait is that for the trace."""

from collections import Counter

import pytest

import accel_fn as af
from tests.sim.programs import assert_equal, train


@pytest.mark.parametrize(
    ("steps", "waits"), [(range(1, 2), {}), (range(3, 6), {"profile.py": 1})], ids=str
)
def test_profiled_steps_are_those_of_the_cpu_and_wait_once_at_their_end(tmp_path, steps, waits):
    transforms = [af.accumulate(2), af.clip(1.0), af.profile(tmp_path, steps=steps)]
    expected, found = train("cpu", transforms), train("sim", transforms)
    assert_equal(found, expected, atol=1e-12)
    assert found.hazards == []
    assert found.waits == Counter(waits)
    assert (tmp_path / "phases.txt").exists()
