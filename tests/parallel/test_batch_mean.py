"""batch_mean: W ranks give value and gradient of the mean over the rows of one process."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.errors import BatchError
from accel_fn.testing import simulate, strategies
from tests.support import strategies as ours

WRAPS = {"wrap_ddp": af.wrap_ddp(), "wrap_fsdp": af.wrap_fsdp(blocks=torch.nn.Linear)}


class Experts(torch.nn.Module):
    """Two experts, of which a router gives each row to one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router = torch.nn.Linear(3, 2).double()
        self.experts = torch.nn.Linear(3, 2).double()

    def forward(self, x):
        routed = self.router(x).softmax(1)
        chosen = F.one_hot(routed.argmax(1), 2).double()
        return (self.experts(x) * routed * chosen).sum(1, keepdim=True), routed, chosen


def loss_of(state):
    def loss_fn(model, batch):
        out, routed, chosen = model(batch[0])
        load = af.batch_mean(chosen, state, "load")
        probability = af.batch_mean(routed, state, "probability")
        return F.mse_loss(out, batch[1]) + 0.1 * 2 * (load * probability).sum()

    return loss_fn


def by_hand(model, batch):
    out, routed, chosen = model(batch[0])
    return F.mse_loss(out, batch[1]) + 0.1 * 2 * (chosen.mean(0) * routed.mean(0)).sum()


def trained(state, parts, wrap):
    model = Experts()
    plan = af.Plan(loss_of(state), model, ours.sgd(model.parameters()))
    state, step = af.build(WRAPS[wrap](plan), state)
    losses = []
    for batch in parts[state.rank]:
        state, report = step(state, batch)
        losses.append(report.loss.item())
    return losses, ours.whole(model.state_dict())


def a_batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 3, generator=generator).double()
    return inputs, inputs.sum(1, keepdim=True).sin()


@pytest.mark.parametrize("wrap", WRAPS)
@ours.share(0.5)
@given(data=st.data())
def test_a_balance_loss_trains_as_in_one_process(wrap, data):
    world_size = data.draw(strategies.world_sizes(3))
    batches = [a_batch(data.draw(st.integers(world_size, 8)), seed) for seed in (1, 2)]
    extra = [
        data.draw(strategies.uneven_parts(len(each[0]) - world_size, world_size))
        for each in batches
    ]
    losses, expected = ours.trained_by_hand(Experts(), batches, loss_fn=by_hand, optimizer=ours.sgd)
    parts = ours.dealt(batches, [[1 + size for size in sizes] for sizes in extra])
    for found, actual in simulate(lambda state: trained(state, parts, wrap), world_size=world_size):
        ours.assert_close(actual, expected)
        assert found == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize(("world_size", "detached"), [(1, False), (2, True)])
def test_several_microbatches_are_refused_on_all_ranks(world_size, detached):
    def run(state):
        def loss_fn(model, batch):
            out = model(batch[0])
            mean = af.batch_mean(out.detach() if detached else out, state, "mean")
            return F.mse_loss(out - mean, batch[1])

        model = ours.regression_model()
        plan = af.Plan(loss_fn, model, ours.sgd(model.parameters()))
        plan = af.compose(af.accumulate(2), af.wrap_ddp())(plan)
        state, step = af.build(plan, state, check_loss=False)
        with pytest.raises(BatchError, match="leave out accumulate"):
            step(state, af.shard_batch(a_batch(6, 0), state))
        return True

    assert all(simulate(run, world_size=world_size))


@pytest.mark.parametrize(
    ("recipe", "sizes", "match"),
    [
        (af.reproducible(2), (4, 4), "got one of 2 parts"),
        (
            af.local_sgd(2),
            (4, 4),
            "where ranks train separately, got one in a loss under local_sgd",
        ),
        (
            af.wrap_ddp(),
            (8, 0),
            "every rank must be in the same collective, got (batch_mean|step) on",
        ),
    ],
    ids=["reproducible", "local_sgd", "a rank without rows"],
)
def test_a_loss_that_has_no_mean_over_all_rows_is_refused_on_all_ranks(recipe, sizes, match):
    parts = [torch.ones(size, 3).double() for size in sizes]

    def run(state):
        def loss_fn(model, batch):
            return af.batch_mean(model(batch), state, "mean").square().sum()

        model = ours.regression_model()
        plan = af.Plan(loss_fn, model, ours.sgd(model.parameters()))
        state, step = af.build(recipe(plan), state, check_loss=False)
        with pytest.raises(af.AccelError, match=match):
            step(state, parts[state.rank])
        return True

    assert all(simulate(run, world_size=2))


def test_ranks_that_average_different_statistics_raise():
    def run(state):
        with pytest.raises(BatchError, match="one structure"):
            af.batch_mean(torch.ones(2, 3), state, f"mean {state.rank}")
        return True

    assert all(simulate(run, world_size=2))


def test_rows_without_a_rank_are_no_rows_of_the_mean():
    def run(state):
        rows = torch.arange(3.0)[: 3 * state.rank, None]
        return af.batch_mean(rows, state, "mean").item()

    assert simulate(run, world_size=2) == [1.0, 1.0]
