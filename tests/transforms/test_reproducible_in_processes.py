"""reproducible over real processes: the bits of one process, and the cost."""

import sys

import pytest

import accel_fn as af
from accel_fn.testing import simulate
from tests.support.compilers import compiles
from tests.support.processes import launch
from tests.support.reproducible_runs import fingerprint

pytestmark = pytest.mark.slow

SCRIPT = """
import torch
import accel_fn as af
from tests.support.reproducible_runs import fingerprint

torch.set_num_threads(1)
torch.manual_seed(torch.initial_seed() + 1)  # whatever it was, it does not count
state = af.init(device="cpu", timeout_s=100)
say(fingerprint(state, af.clip(0.5)))
"""


@pytest.fixture(scope="module")
def hash_of_one():
    """Return the hash after twenty updates of one process."""
    (found,) = simulate(lambda state: fingerprint(state, af.clip(0.5)), world_size=1)
    return found


def test_processes_have_the_hash_of_one(hash_of_one):
    launch(SCRIPT, num_processes=2, expect=[hash_of_one] * 2)


SENT = """
import os, socket, struct, torch
import accel_fn as af
from tests.support import strategies as ours

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
state, step = af.build(af.reproducible(num_virtual_ranks=8)(plan), state)
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
@pytest.mark.parametrize("num_processes", [2, 4])
def test_as_much_is_sent_as_an_all_reduce_sends(num_processes):
    """The amount is in units of the gradients, for each rank and step."""
    output = launch(SENT, num_processes=num_processes)
    expected = 2 * (num_processes - 1) / num_processes
    for line in output.splitlines():
        assert float(line) == pytest.approx(expected, abs=0.01)


COMPILED = """
import torch
import accel_fn as af
from torch import nn
from torch._dynamo.utils import counters
from tests.support.reproducible_runs import batches, fingerprint

torch.set_num_threads(1)
state = af.init(device="cpu", timeout_s=60)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
recipe = af.compose(af.clip(0.5), af.compiled())
hashes = [fingerprint(state, recipe, batches(3), model=model)]

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2)]
model = nn.Sequential(nn.Linear(3, 8), *blocks, nn.Linear(8, 1))
recipe = af.compose(af.clip(0.5), af.compiled(scope="blocks"))
graphs = counters["stats"]["unique_graphs"]
hashes.append(fingerprint(state, recipe, batches(3), model=model))
assert counters["stats"]["unique_graphs"] > graphs
say(*hashes)
"""


@compiles
def test_compiled_losses_and_blocks_have_one_hash_too():
    """Dropout draws other numbers in a graph, but the same ones on any number of ranks."""
    alone = launch(COMPILED, num_processes=1).splitlines()
    of_loss, of_blocks = alone[0].split()
    assert of_loss != of_blocks
    launch(COMPILED, num_processes=2, expect=alone * 2)
