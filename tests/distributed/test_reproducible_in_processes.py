"""reproducible over real processes: the bits of one process alone, and what they cost."""

import sys
from itertools import pairwise

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
state = af.init(device="cpu", timeout_s=100)
say(fingerprint(state, af.clip(0.5), batches(6)))
"""


@pytest.mark.parametrize("num_processes", [2, 4])
def test_processes_have_the_hash_of_one(num_processes):
    (expected,) = testing.simulate(
        lambda state: fingerprint(state, af.clip(0.5), batches(6)), world_size=1
    )
    launch(SCRIPT, num_processes=num_processes, expect=[expected] * num_processes)


SENT = """
import os, socket, struct, torch
import accel_fn as af
from tests import strategies as ours

def sent():
    total = 0  # bytes that others have acknowledged, of all connections
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(number)) as each:
                told = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
        except OSError:
            continue
        total += struct.unpack_from("Q", told, 120)[0]
    return total

state = af.init(device="cpu", timeout_s=60)
model = torch.nn.Linear(1024, 1024)
plan = af.Plan(ours.mse, model, torch.optim.SGD(model.parameters(), 0.1))
state, step = af.build(state, {owner}(plan))
batch = torch.ones(8 // state.world_size, 1024), torch.ones(8 // state.world_size, 1024)
for _ in range(3):
    state, _ = step(state, batch)
af.barrier(state)
before = sent()
for _ in range(10):
    state, _ = step(state, batch)
af.barrier(state)
say((sent() - before) / 10 / (4 * 1024 * 1025))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for what a socket has sent")
@pytest.mark.parametrize("owner", ["af.reproducible(num_slots=8)", "af.wrap_ddp()"])
@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_as_much_is_sent_as_an_all_reduce_sends(owner, num_processes):
    """In gradients, of each rank in a step."""
    output = launch(SENT.format(owner=owner), num_processes=num_processes)
    expected = 2 * (num_processes - 1) / num_processes
    for line in output.splitlines():
        assert float(line) == pytest.approx(expected, abs=0.01)


HELD = """
import re, torch
from pathlib import Path
import accel_fn as af
from tests import strategies as ours

def most():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

state = af.init(device="cpu")
model = torch.nn.Linear(3200, 3200)
plan = af.Plan(ours.mse, model, torch.optim.SGD(model.parameters(), 0.1))
state, step = af.build(state, af.reproducible(num_slots={num_slots})(plan))
for _ in range(3):
    state, _ = step(state, (torch.ones(16, 3200), torch.ones(16, 3200)))
say(most() / (4 * 3200 * 3201))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the most that was held")
def test_twice_as_many_slots_hold_one_gradient_more():
    most = [float(launch(HELD.format(num_slots=each), num_processes=1)) for each in (1, 4, 16)]
    assert [later - before for before, later in pairwise(most)] == pytest.approx([2, 2], abs=0.5)


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
