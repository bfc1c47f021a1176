"""Backwards that start from the last batch's weight: exact for any batch, and with one message a step."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate
from accel_fn.testing.internals import num_calls
from tests.support import strategies as ours

ROWS = torch.Generator().manual_seed(0)
X = torch.randn(64, 3, generator=ROWS).double()
Y = torch.randn(64, 1, generator=ROWS).double()


def loss_fn(model, batch):
    """Return the mean over the rows that the mask counts, and two metrics."""
    x, y, mask = batch
    errors = ((model(x) - y) ** 2).squeeze(1)
    mean = (errors * mask).sum() / mask.sum()
    return mean, {"mean": 2 * mean.detach(), "large": (((errors > 1) * mask).sum(), mask.sum())}


def weight_fn(batch):
    return batch[2].sum()


def batches_of(sizes):
    """Return a batch of so many rows for each size, of which the mask counts all but every fourth."""
    found, start = [], 0
    for size in sizes:
        rows = [(start + index) % 64 for index in range(size)]
        mask = torch.tensor([float(row % 4 != 3) for row in rows], dtype=torch.float64)
        found.append((X[rows], Y[rows], mask))
        start += size
    return found


def by_hand(batches):
    model = ours.regression_model()
    optimizer = ours.adamw(model.parameters())
    found = []
    for batch in batches:
        if batch[2].sum():
            loss, metrics = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total, count = metrics["large"]
            found.append([loss.item(), float(metrics["mean"]), float(total / count)])
    return found, model.state_dict()


@given(
    sizes=st.lists(st.integers(1, 9), min_size=3, max_size=6),
    world_size=st.integers(2, 3),
    num_parts=st.integers(1, 3),
)
@example(sizes=[8, 8, 5, 8, 1, 2], world_size=2, num_parts=1)
@example(sizes=[4, 1, 1, 4, 3], world_size=3, num_parts=2)
def test_batches_of_changing_weights_train_as_by_hand(sizes, world_size, num_parts):
    """Some ranks have no rows, and some rows count nothing."""
    batches = [each for each in batches_of(sizes) if each[2].sum()]
    expected, parameters = by_hand(batches)

    def run(state):
        plan = af.Plan(
            loss_fn, model := ours.regression_model(), ours.adamw(model.parameters()), weight_fn
        )
        recipe = af.compose(af.wrap_ddp(), af.accumulate(num_parts))
        state, step = af.build(recipe(plan), state, checks=())
        found = []
        for batch in batches:
            state, report = step(state, af.shard_batch(batch, state))
            assert report.weight == float(batch[2].sum())
            means = report.metrics
            found.append([float(report.loss), float(means["mean"]), float(means["large"])])
        return found, model.state_dict()

    for found, trained in simulate(run, world_size=world_size):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        ours.assert_close(trained, parameters)


def test_a_step_sends_one_message_beside_its_gradients():
    def run(state):
        state, step = af.build(af.wrap_ddp()(ours.plan()), state, checks=())
        counts = []
        for _ in range(4):
            before = num_calls()
            state, _ = step(state, (X[:4], Y[:4]))
            counts.append(num_calls() - before)
        return counts

    first, *later = simulate(run, world_size=2)[0]
    assert later == [1, 1, 1]
    assert first > 1


@pytest.mark.parametrize("at", [0, 2])
def test_a_rank_that_cannot_count_its_batch_raises_on_all_ranks_in_its_own_step(at):
    def run(state):
        def weight_fn(batch):
            if state.rank == 1 and batch[0][0, 0] == 100.0:
                raise ValueError("no weight today")
            return len(batch[0])

        plan = af.Plan(
            ours.mse, model := ours.regression_model(), ours.sgd(model.parameters()), weight_fn
        )
        state, step = af.build(af.wrap_ddp()(plan), state, checks=())
        for number in range(4):
            x = X[:4] if number != at else torch.full((4, 3), 100.0, dtype=torch.float64)
            before = {name: each.clone() for name, each in model.state_dict().items()}
            if number == at:
                with pytest.raises(ValueError, match=r"no weight today|must be able to count"):
                    step(state, (x, Y[:4]))
                ours.assert_close(model.state_dict(), before)
            else:
                state, _ = step(state, (x, Y[:4]))
        return state.step

    assert simulate(run, world_size=2) == [3, 3]


def test_a_resumed_run_expects_the_weight_that_the_run_expected(tmp_path):
    """Otherwise its last bits would differ where batches weigh differently."""
    sizes = [8, 5, 7, 3, 8]

    def run(state, resumes):
        plan = af.Plan(
            loss_fn, model := ours.regression_model(), ours.adamw(model.parameters()), weight_fn
        )
        state, step = af.build(af.wrap_ddp()(plan), state, checks=())
        if resumes:
            state = af.load(step, state, tmp_path)
        for batch in batches_of(sizes)[state.step :]:
            state, _ = step(state, af.shard_batch(batch, state))
            if state.step == 2 and not resumes:
                af.save(step, state, tmp_path)
        return model.state_dict()

    whole, _ = simulate(lambda state: run(state, False), world_size=2)
    for found in simulate(lambda state: run(state, True), world_size=2):
        torch.testing.assert_close(found, whole, rtol=0, atol=0)
