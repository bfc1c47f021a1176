"""Law 3 for BatchNorm: with sync_batchnorm, the layers of W ranks use the rows of one process."""

import copy
from itertools import zip_longest

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.support import strategies as ours

wraps = pytest.mark.parametrize("wrap", [af.wrap_ddp, af.wrap_fsdp], ids=lambda each: each.__name__)
few = ours.share(0.2)
OPTIONS = [{}, {"momentum": None}, {"tracks": False}]


class Normed(nn.Module):
    """A network with two BatchNorm layers, one of them inside of a skip connection."""

    def __init__(self, *, momentum=0.1, tracks=True):
        super().__init__()
        torch.manual_seed(0)
        options = {"momentum": momentum, "track_running_stats": tracks}
        self.first, self.norm = nn.Linear(3, 5), nn.BatchNorm1d(5, **options)
        self.second, self.inner = nn.Linear(5, 5), nn.BatchNorm1d(5, affine=False, **options)
        self.head = nn.Linear(5, 2)
        self.double()

    def forward(self, inputs):
        found = self.norm(self.first(inputs)).tanh()
        return self.head(found + self.inner(self.second(found)).tanh())


def loss_fn(model, batch):
    """Return the mean over rows that weigh something; 0 / 0 if none does."""
    outputs, weights = model(batch[:, :3]), batch[:, 5:]
    loss = ((outputs - batch[:, 3:5]).square() * weights).sum() / weights.sum()
    return loss, {"first": ((outputs[:, :1] * weights).sum(), weights.sum())}


def weight_fn(batch):
    return batch[:, 5].sum()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_hand(model, groups):
    """Train on groups of micro-batches, one update a group; return losses and tensors."""
    model, losses = copy.deepcopy(model), []
    optimizer = sgd(model)
    for group in groups:
        optimizer.zero_grad()
        total, loss = sum(map(weight_fn, group)), torch.zeros(()).double()
        for rows in group:
            if weight_fn(rows):
                share = loss_fn(model, rows)[0] * weight_fn(rows) / total
                share.backward()
                loss += share.detach()
            else:
                model(rows[:, :3])
        optimizer.step()
        losses.append(loss)
    return losses, dict(model.state_dict())


def over_ranks(model, parts, recipe, *, world_size):
    """Train on `parts[batch][rank]`; return losses and tensors of each rank."""

    def run(state):
        mine = copy.deepcopy(model)
        plan = af.Plan(loss_fn, mine, sgd(mine), weight_fn=weight_fn)
        state, step = af.build(recipe(plan), state, check_loss=False)
        losses = []
        for ranks in parts:
            state, report = step(state, ranks[state.rank])
            losses.append(report.loss)
        return losses, ours.whole(mine.state_dict())

    return simulate(run, world_size=world_size)


@st.composite
def worlds(draw):
    """Draw batches of rows, some of which weigh nothing, and the number that each rank has of each."""
    world_size = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(strategies.seeds()))
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        num_rows = draw(st.integers(2, 10))
        rows = torch.randn(num_rows, 6, generator=generator).double()
        rows[:, 5] = torch.tensor(
            draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows))
        )
        rows[draw(st.integers(0, num_rows - 1)), 5] = 1
        parts.append(rows.split(draw(strategies.uneven_parts(num_rows, world_size))))
    return parts


def microbatches(rows, num_parts):
    """Cut a rank's rows as `accumulate` does; those that weigh nothing come first."""
    parts = [each for each in rows.tensor_split(min(num_parts, max(1, len(rows)))) if len(each)]
    return sorted(parts, key=lambda part: bool(weight_fn(part)))


def assert_same(ranks, losses, tensors):
    for found, actual in ranks:
        ours.assert_close(actual, tensors)
        torch.testing.assert_close(found, losses, **ours.EXACT)


EMPTY = torch.empty(0, 6).double()
ROWS = torch.linspace(-2, 3, 36).sin().double().reshape(6, 6)
ROWS[:, 5] = torch.tensor([1, 2, 0, 0, 1, 1])


@wraps
@few
@given(options=st.sampled_from(OPTIONS), parts=worlds())
@example(options=OPTIONS[1], parts=[[ROWS, EMPTY], [EMPTY, ROWS]])  # a rank without rows
@example(options=OPTIONS[2], parts=[[ROWS, EMPTY], [EMPTY, ROWS]])
@example(options={}, parts=[[ROWS[:2], ROWS[2:4], ROWS[4:]]])  # one whose rows weigh nothing: 0 / 0
@example(options={}, parts=[[EMPTY, ROWS[:1], ROWS[1:]]])  # a single row, which has no variance
def test_any_ranks_are_one_process(wrap, options, parts):
    model = Normed(**options)
    expected = by_hand(model, [[torch.cat(ranks)] for ranks in parts])
    recipe = wrap(sync_batchnorm=True)
    assert_same(over_ranks(model, parts, recipe, world_size=len(parts[0])), *expected)


@pytest.mark.filterwarnings("ignore:step. model should have no BatchNorm")
@wraps
@few
@given(parts=worlds(), num_microbatches=st.integers(2, 3))
@example(parts=[[ROWS[2:4], ROWS[:2], ROWS[3:]]], num_microbatches=3)
def test_under_accumulate_a_micro_batch_of_all_ranks_is_one_of_one_process(
    wrap, parts, num_microbatches
):
    groups = []
    for ranks in parts:
        cut = [microbatches(each, num_microbatches) for each in ranks]
        groups.append([torch.cat(same) for same in zip_longest(*cut, fillvalue=EMPTY)])
    assume(all(len(rows) > 1 for group in groups for rows in group))  # torch wants a variance
    model = Normed()
    recipe = af.compose(wrap(sync_batchnorm=True), af.accumulate(num_microbatches))
    found = over_ranks(model, parts, recipe, world_size=len(parts[0]))
    assert_same(found, *by_hand(model, groups))


@pytest.mark.filterwarnings("ignore:step. model should have no BatchNorm")
@wraps
def test_rows_that_are_dealt_in_turn_are_the_same_micro_batches_on_any_number_of_ranks(wrap):
    rows = torch.cat([ROWS, 2 * ROWS])
    batches = [rows, rows.roll(1, 0)]
    in_turn = af.accumulate(2, split=lambda rows: [rows[first::2] for first in range(2)])
    parts = [rows.chunk(3) for rows in batches]
    model = Normed()
    recipe = af.compose(wrap(sync_batchnorm=True), in_turn)
    found = over_ranks(model, parts, recipe, world_size=3)
    assert_same(found, *by_hand(model, [[rows[0::2], rows[1::2]] for rows in batches]))


@wraps
def test_values_far_from_zero_have_their_variance_in_single_precision(wrap):
    """A sum of squares would have none of its digits left."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)) + 1e4

    def normalised(state, recipe):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        plan = af.Plan(lambda model, x: model(x).square().mean(), model, sgd(model))
        state, step = af.build(recipe(plan), state)
        step(state, af.shard_batch(x, state))
        return model[0].running_var

    expected = 0.9 + 0.1 * x.double().var(0)
    for found in simulate(lambda state: normalised(state, wrap(sync_batchnorm=True)), world_size=3):
        # a mean near 1e4 has an error of 1e-3 in float32, and the variance that of its square
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def trained(recipe, terms, parts, loss_fn):
    """Return the tensors of each rank after two steps on `parts[rank]`."""

    def run(state):
        model = Normed()
        weight_fns = {
            name: lambda rows, column=column: rows[:, column].sum()
            for name, column in terms.items()
        }
        plan = af.Plan(loss_fn, model, sgd(model), weight_fn=weight_fns)
        state, step = af.build(recipe(plan), state, check_loss=False)
        for _ in range(2):
            state, _ = step(state, parts[state.rank])
        return ours.whole(model.state_dict())

    return simulate(run, world_size=len(parts))


@wraps
@pytest.mark.parametrize(
    ("weights", "sizes"),
    [
        ([(1, 0)] * 3 + [(0, 1)] * 3, [3, 0, 3]),
        ([(1, 1), (0, 1), (0, 0), (1, 0), (0, 0), (0, 1)], [1, 2, 3]),
    ],
)
def test_a_term_that_weighs_nothing_on_a_rank_sends_nothing_into_the_statistics(
    wrap, weights, sizes
):
    """Its own loss is 0 / 0, behind a layer that the other term does not reach."""
    rows = torch.cat([ROWS[:, :4], torch.tensor(weights).double()], dim=1)

    def terms(model, rows):
        middle = model.norm(model.first(rows[:, :3])).tanh()
        far = model.head(model.inner(model.second(middle))).square().mean(1)
        near = middle.square().mean(1)
        a, b = rows[:, 4], rows[:, 5]
        return {"near": (near * a).sum() / a.sum(), "far": (far * b).sum() / b.sum()}

    columns = {"near": 4, "far": 5}
    (expected,) = trained(af.compose(), columns, [rows], terms)
    for found in trained(wrap(sync_batchnorm=True), columns, rows.split(sizes), terms):
        ours.assert_close(found, expected)
