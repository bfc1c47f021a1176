"""seed_all: every generator, its own numbers on each rank, and after a resume those that would have come."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

import accel_fn as af
from tests.support.processes import launch


def drawn(state, **options):
    af.seed_all(state, **options)
    return random.random(), float(np.random.rand()), float(torch.rand(()).double())


def test_every_generator_draws_the_same_again():
    state = af.DistState(seed=5)
    assert drawn(state) == drawn(state)


@pytest.mark.parametrize(
    "other",
    [
        af.DistState(seed=6, world_size=2),
        af.DistState(seed=5, world_size=2, rank=1),
        af.DistState(seed=5, world_size=2, step=9),
    ],
    ids=["seed", "rank", "step"],
)
def test_every_generator_draws_other_numbers_for_another(other):
    one = drawn(af.DistState(seed=5, world_size=2))
    assert all(mine != its for mine, its in zip(one, drawn(other), strict=True))


def test_ranks_draw_other_dropout_masks_unless_they_are_to_draw_the_same():
    states = [af.DistState(rank=rank, world_size=3) for rank in range(3)]

    def masks(**options):
        for state in states:
            af.seed_all(state, **options)
            yield tuple(nn.functional.dropout(torch.ones(64)).tolist())

    assert len(set(masks())) == 3
    assert len(set(masks(per_rank=False))) == 1


def test_whether_each_rank_has_its_own_is_a_flag():
    with pytest.raises(TypeError, match="seed_all: per_rank must be True or False, got 'yes'"):
        af.seed_all(af.DistState(), per_rank="yes")


def train(state, folder, num_steps):
    """Train with dropout up to a step, from the checkpoint of a folder if it holds one."""
    af.seed_all(state)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    plan = af.Plan(
        lambda model, rows: model(rows).square().mean(),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    state, step = af.build(af.wrap_ddp()(plan), state)
    state = af.resume(step, state, folder)
    while state.step < num_steps:
        rows = torch.arange(24.0).view(8, 3).double() + state.step
        state, _ = step(state, af.shard_batch(rows, state))
    af.save(step, state, folder)
    parameters = {name: value.tolist() for name, value in model.state_dict().items()}
    return parameters, random.random(), float(np.random.rand()), float(torch.rand(()))


RESUMED = """
import json
import accel_fn as af
from tests.core.test_rng import train

with af.distributed(device="cpu", seed=3) as state:
    whole = train(state, {folder!r} + "/whole", 5)
    train(state, {folder!r} + "/stopped", 2)
    resumed = train(state, {folder!r} + "/stopped", 5)
    say(json.dumps([state.rank, whole == resumed, resumed[1]]))
"""


@pytest.mark.slow
def test_a_resumed_run_draws_on_every_rank_what_the_whole_run_draws(tmp_path):
    output = launch(RESUMED.format(folder=str(tmp_path)))
    lines = sorted(json.loads(line) for line in output.splitlines())
    assert [line[:2] for line in lines] == [[0, True], [1, True]]
    assert lines[0][2] != lines[1][2]
