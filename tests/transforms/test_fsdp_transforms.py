"""Every other transform gives the same result over shards as on one process."""

import pytest
import torch

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law07_scaling import scaled
from tests.support import strategies as ours

GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [
    (torch.randn(size, 3, generator=GENERATOR).double(), torch.randn(size, 1).double())
    for size in (7, 6, 5, 4, 2)
]
RECIPES = {
    "uniform": af.swa(num_warmup=1),
    "freeze": af.freeze("0", until=3),
    "clip_value": af.clip_value(0.05),
    "skip_spikes": af.skip_spikes(window=4),
    "scaled, scheduled and averaged": af.compose(
        scaled(8.0), af.schedule(lambda num_updates: 1 / (num_updates + 1)), af.ema(0.5)
    ),
}


def train(state, recipe, start=0, folder=None, skips=True):
    """If a transform skips updates, batch 3 has a non-finite gradient on the last rank, or is left
    out."""
    state, step = ours.built(recipe, state, optimizer=ours.adamw)
    if start:
        state = af.load(step, state, folder)
    for index, batch in list(enumerate(BATCHES))[start:]:
        if index == 2 and folder:
            af.save(step, state, folder)
        is_bad = index == 3 and (step.plan.accept or state.scaler)
        if is_bad and not skips:
            continue
        bad = float("nan") if is_bad and state.rank == state.world_size - 1 else 1.0
        mine = [each.tensor_split(state.world_size)[state.rank] for each in batch]
        state, _ = step(state, (mine[0] * bad, mine[1]))
    found = copied(step.plan.model)
    if "average" in repr(step.plan):
        with af.averaged(step):
            found |= {f"mean {name}": each for name, each in copied(step.plan.model).items()}
    return found


def copied(model):
    return {name: each.clone() for name, each in ours.whole(model.state_dict()).items()}


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_the_same_over_shards(name):
    recipe = RECIPES[name]
    expected = train(af.DistState(), recipe, skips=False)
    sharded = af.compose(af.wrap_fsdp(), recipe)
    for found in simulate(lambda state: train(state, sharded), world_size=2):
        ours.assert_close(found, expected)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("skip_spikes", (1, 2)),
        pytest.param("scaled, scheduled and averaged", (3, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_it_keeps_continues_at_another_number_of_shards(tmp_path, name, sizes):
    recipe = af.compose(af.wrap_fsdp(), RECIPES[name])
    expected = train(af.DistState(), RECIPES[name], skips=False)
    first, second = sizes
    simulate(lambda state: train(state, recipe, folder=tmp_path), world_size=first)
    runs = simulate(lambda state: train(state, recipe, 2, tmp_path), world_size=second)
    for found in runs:
        ours.assert_close(found, expected)
