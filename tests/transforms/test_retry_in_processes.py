"""accumulate("auto") over real processes: buffers, random numbers and loss scale are as without an
OOM."""

import json
import random

import numpy as np
import pytest
import torch

import accel_fn as af
from tests.laws.law07_scaling import scaled
from tests.support import strategies as ours
from tests.support.out_of_memory import FULL, model_with_statistics, told_by
from tests.support.processes import launch

SCRIPT = """
import json
import torch
import accel_fn as af
from tests.transforms.test_retry_in_processes import train

state = af.init(device="cpu", timeout_s=100)
wrap = af.wrap_ddp()
limit = 2 if state.rank == state.world_size - 1 else None
found, counts = train(state, af.compose(wrap, af.accumulate("auto")), limit=limit)
expected, _ = train(state, af.compose(wrap, af.accumulate(4)), limit=None)
say(json.dumps([found, expected, counts]))
"""


def train(state, recipe, limit):
    """Train a loss with noise from all generators, so that a repeated micro-batch draws again."""
    torch.manual_seed(state.rank), np.random.seed(state.rank), random.seed(state.rank)

    def loss_fn(model, batch):
        noise = np.random.rand() + random.random()
        inputs = torch.nn.functional.dropout(batch[0], 0.5) + noise
        loss = ours.mse(model, (inputs, batch[1]))
        if limit is not None and len(inputs) > limit:
            raise FULL["accelerator"]()
        return loss

    model = model_with_statistics()
    plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()))
    state, step = af.build(af.compose(recipe, scaled(8.0, growth_interval=1))(plan), state)
    counts = []
    for _ in range(3):
        state, report = step(state, (torch.ones(8, 3).double(), torch.ones(8, 1).double()))
        counts.append(report.extras.get("num_microbatches"))
    tensors = {name: each.tolist() for name, each in model.state_dict().items()}
    drawn = [torch.rand(3).tolist(), np.random.rand(), random.random()]
    return [tensors, drawn, told_by(state.scaler)], counts


@pytest.mark.slow
def test_ranks_that_had_room_do_it_again_as_well():
    """Only the last rank runs out of memory."""
    lines = launch(SCRIPT, num_processes=2).splitlines()
    assert len(lines) == 2
    for line in lines:
        found, expected, counts = json.loads(line)
        assert found == expected
        assert counts == [4, 4, 4]
