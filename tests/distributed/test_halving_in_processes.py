"""accumulate("auto") over real processes: random numbers, too, are as if it had fitted from the start."""

import json

import pytest
import torch

import accel_fn as af
from accel_fn._shards import local
from tests import strategies as ours
from tests.processes import launch
from tests.properties.test_halving import FULL

pytestmark = pytest.mark.slow

SCRIPT = """
import json
import torch
import accel_fn as af
from tests.distributed.test_halving_in_processes import train

state = af.init(device="cpu", timeout_s=100)
wrap = af.{wrap}()
limit = 2 if state.rank == state.world_size - 1 else None
found = train(state, af.compose(wrap, af.accumulate("auto")), limit=limit)
expected = train(state, af.compose(wrap, af.accumulate(4)), limit=None)
say(json.dumps([found, expected]))
"""


def train(state, recipe, limit):
    """With dropout, so that a micro-batch that is done again draws again."""
    torch.manual_seed(state.rank)

    def loss_fn(model, batch):
        inputs = torch.nn.functional.dropout(batch[0], 0.5)
        loss = ours.mse(model, (inputs, batch[1]))
        if limit is not None and len(inputs) > limit:
            raise FULL["accelerator"]()
        return loss

    model = ours.regression_model()
    plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()))
    state, step = af.build(state, recipe(plan))
    for _ in range(3):
        state, _ = step(state, (torch.ones(8, 3).double(), torch.ones(8, 1).double()))
    parameters = [local(each).tolist() for each in model.parameters()]
    return [parameters, torch.rand(3).tolist()]


@pytest.mark.parametrize("wrap", ["wrap_ddp", "wrap_fsdp"])
@pytest.mark.parametrize("num_processes", [2, 4])
def test_ranks_that_had_room_do_it_again_as_well(num_processes, wrap):
    """The last rank alone runs out of memory."""
    script = SCRIPT.replace("{wrap}", wrap)
    lines = launch(script, num_processes=num_processes).splitlines()
    assert len(lines) == num_processes
    for line in lines:
        found, expected = json.loads(line)
        assert found == expected
