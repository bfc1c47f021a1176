"""reproducible over real processes: the bits of one process alone."""

import pytest

import accel_fn as af
from accel_fn import testing
from tests.compilers import compiles
from tests.processes import launch
from tests.properties.test_reproducible import batches, fingerprint

pytestmark = pytest.mark.slow

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


COMPILED = """
import torch
import accel_fn as af
from torch import nn
from tests.properties.test_reproducible import batches, fingerprint

torch.set_num_threads(1)
state = af.init(device="cpu", timeout_s=60)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
recipe = af.compose(af.clip(0.5), af.compiled())
say(fingerprint(state, recipe, batches(3), model=model))
"""


@compiles
def test_compiled_losses_have_one_hash_too():
    """Dropout draws other numbers in a graph, but the same on any number of ranks."""
    alone = launch(COMPILED, num_processes=1).splitlines()
    launch(COMPILED, num_processes=2, expect=alone * 2)
