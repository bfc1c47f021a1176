"""reproducible over real processes: the bits of one process alone."""

import pytest

import accel_fn as af
from accel_fn import testing
from tests.processes import launch
from tests.properties.test_reproducible import batches, fingerprint

SCRIPT = """
import torch
import accel_fn as af
from tests.properties.test_reproducible import batches, fingerprint

torch.set_num_threads(1)
torch.manual_seed(torch.initial_seed() + 1)  # whatever it was, it does not count
state = af.init(device="cpu", timeout_s=30)
say(fingerprint(state, af.clip(0.5), batches(6)))
"""


@pytest.mark.parametrize("num_processes", [2, 4])
def test_processes_have_the_hash_of_one(num_processes):
    (expected,) = testing.simulate(
        lambda state: fingerprint(state, af.clip(0.5), batches(6)), world_size=1
    )
    launch(SCRIPT, num_processes=num_processes, expect=[expected] * num_processes)
