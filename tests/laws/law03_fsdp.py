"""Laws 2, 3, 6 and 7 for wrap_fsdp: W ranks with shards give the result of one rank."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.laws.law03_worlds import dealt_batches
from tests.laws.law07_scaling import OPTIMIZERS
from tests.support import strategies as ours

few = ours.share(0.16)
optimizers = pytest.mark.parametrize(
    "optimizer",
    ["adamw", *[pytest.param(name, marks=pytest.mark.slow) for name in ("fused adamw", "sgd")]],
)  # torch has no fused SGD for shards
worlds = st.sampled_from(
    [(size, groups) for size in (2, 3, 4) for groups in range(1, size + 1) if size % groups == 0]
)
"""Numbers of ranks, and of groups of shards among them."""
ONE_BATCH = [(torch.ones(3, 3).double(), torch.ones(3, 1).double())]


@optimizers
@few
@given(
    dealt=dealt_batches(strategies.batches(), 4),
    num_microbatches=st.integers(1, 4),
    blocks=st.sampled_from([None, ""]),
)
@example(dealt=(ONE_BATCH, [[0, 0, 3, 0]]), num_microbatches=2, blocks="")
def test_any_ranks_are_one_rank(optimizer, dealt, num_microbatches, blocks):
    batches, sizes = dealt
    model, options = ours.regression_model(), {"optimizer": OPTIMIZERS[optimizer]}
    recipe = af.compose(af.wrap_fsdp(blocks=blocks), af.accumulate(num_microbatches), af.clip(0.5))
    ranks = ours.trained(model, ours.dealt(batches, sizes), recipe, **options)
    ours.assert_trained(ranks, ours.trained_by_hand(model, batches, max_norm=0.5, **options))


@few
@given(
    weights=st.lists(st.integers(0, 1), min_size=4, max_size=8).filter(any),
    world_size=st.integers(2, 4),
    num_microbatches=st.integers(1, 3),
)
@example(weights=[0, 0, 1, 1], world_size=2, num_microbatches=1)
@example(weights=[0, 1, 1, 0], world_size=4, num_microbatches=2)
def test_ranks_that_count_nothing_have_no_part_in_the_mean(weights, world_size, num_microbatches):
    """Their own loss is 0 / 0."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(len(weights), 4, dtype=torch.float64, generator=generator)
    batch[:, 3] = torch.tensor(weights)
    recipe = af.compose(af.wrap_fsdp(), af.accumulate(num_microbatches))

    def loss_fn(model, rows):
        return (model(rows[:, :3]).square() * rows[:, 3:]).sum() / rows[:, 3].sum()

    def train(state, recipe=recipe):
        model = ours.regression_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        plan = af.Plan(loss_fn, model, optimizer, weight_fn=lambda rows: rows[:, 3].sum())
        state, step = af.build(recipe(plan), state)
        part = batch.tensor_split(state.world_size)[state.rank]
        state, report = step(state, part)
        return [report.loss, step.forward(state, part)], ours.whole(model.state_dict())

    losses, expected = train(af.DistState(), af.compose())
    for found, actual in simulate(train, world_size=world_size):
        ours.assert_close(actual, expected)
        torch.testing.assert_close(found, losses)


def test_a_batch_without_any_items_has_a_gradient_of_zero_as_on_one_rank():
    nothing = ours.rows(ONE_BATCH[0], 0, 0)
    batches = [ONE_BATCH[0], nothing, ONE_BATCH[0]]
    alone = ours.trained(ours.regression_model(), [batches], af.compose())
    parts = ours.dealt(batches, [[0, 3], [0, 0], [2, 1]])
    ours.assert_trained(ours.trained(ours.regression_model(), parts, af.wrap_fsdp()), alone[0])


@few
@given(batches=strategies.batches(num_batches=2), max_norm=st.floats(1e-3, 1e3), world=worlds)
@example(batches=ONE_BATCH, max_norm=0.5, world=(4, 2))
def test_the_norm_is_that_of_all_shards_and_what_is_clipped_by_it_is_within_the_bound(
    batches, max_norm, world
):
    """With lr=1 and plain SGD, a step moves the parameters by the gradient."""

    def run(state, recipe):
        model = ours.regression_model()
        plan = af.Plan(ours.mse, model, torch.optim.SGD(model.parameters(), lr=1.0))
        state, step = af.build(af.compose(recipe, af.clip(max_norm))(plan), state)
        found = []
        for batch in batches:
            before = {name: each.clone() for name, each in ours.whole(model.state_dict()).items()}
            state, report = step(state, af.shard_batch(batch, state))
            after = ours.whole(model.state_dict())
            moved = torch.cat([(after[name] - before[name]).flatten() for name in after])
            found.append([float(report.grad_norm), float(moved.norm())])
        return torch.tensor(found)

    alone = run(af.DistState(), af.compose())
    world_size, num_groups = world
    wrap = af.wrap_fsdp(replicate=num_groups)
    for norms in simulate(lambda state: run(state, wrap), world_size=world_size):
        torch.testing.assert_close(norms, alone)  # both reports are in float32
        assert norms[:, 1].max() <= max_norm * (1 + 1e-6)
