"""check_replicas: every rank raises at the next comparison after a replica has drifted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.support import strategies as ours

BATCH = (torch.ones(2, 3).double(), torch.zeros(2, 1).double())

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


@ours.share(0.34)
@given(
    world_size=st.integers(2, 4),
    every=st.integers(1, 3),
    bad_step=st.integers(1, 4),
    one_is_bad=st.booleans(),
    rank=st.integers(0, 3),
    bad_names=st.sets(st.sampled_from(NAMES), min_size=1),
)
def test_the_first_parameter_that_differs_is_named_on_every_rank(
    world_size, every, bad_step, one_is_bad, rank, bad_names
):
    """The difference is one bit of one number."""
    one = {rank % world_size}
    bad_ranks = one if one_is_bad else set(range(world_size)) - one
    told_at = -(-bad_step // every) * every

    def run(state):
        model = ours.regression_model()
        plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
        recipe = af.compose(af.wrap_ddp(), af.check_replicas(every))
        state, step = af.build(recipe(plan), state)
        for number in range(1, told_at):
            if number == bad_step and state.rank in bad_ranks:
                spoil(model)
            state, _ = step(state, BATCH)
        if told_at == bad_step and state.rank in bad_ranks:
            spoil(model)
        with pytest.raises(RuntimeError) as caught:
            step(state, BATCH)
        return str(caught.value)

    def spoil(model):
        with torch.no_grad():
            for name in bad_names:
                each = model.get_parameter(name)
                each.view(-1).view(torch.int64)[0] ^= 1 << 30

    first, *others = simulate(run, world_size=world_size)
    assert all(words == first for words in others)
    name = next(name for name in NAMES if name in bad_names)
    assert f"at step {told_at}, {name} differs on rank" in first
    named = {int(each) for each in first.split("rank")[-1].strip("s ").split(";")[0].split(",")}
    assert named == (set(range(world_size)) - bad_ranks if 0 in bad_ranks else bad_ranks)


@ours.share(0.34)
@given(batches=strategies.batches(), world_size=st.integers(1, 3))
def test_where_all_is_well_nothing_changes_by_a_bit(batches, world_size):
    parts = ours.dealt_evenly(batches, world_size)
    expected = ours.trained(ours.regression_model(), parts, af.wrap_ddp())
    watched = af.compose(af.wrap_ddp(), af.check_replicas(1))
    found = ours.trained(ours.regression_model(), parts, watched)
    for (_, actual), (_, parameters) in zip(found, expected, strict=True):
        ours.assert_identical(actual, parameters)
