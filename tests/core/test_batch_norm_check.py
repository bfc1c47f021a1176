"""The step warns once of BatchNorm in training mode where its rows are cut, and of no other."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

X = torch.linspace(-1, 1, 36).sin().double().reshape(12, 3)
BATCH = X, X[:, :1]


def warned(recipe, model=None, *, world_size=1, num_steps=3):
    """Return the warnings of a run, and that they are of this file."""

    def run(state):
        mine = made() if model is None else model()
        state, step = af.build(recipe(af.Plan(ours.mse, mine, ours.sgd(mine.parameters()))), state)
        for _ in range(num_steps):
            state, _ = step(state, af.shard_batch(BATCH, state))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        simulate(run, world_size=world_size)
    assert all(each.filename == __file__ for each in found)
    return [str(each.message) for each in found]


def made(*layers):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), *(layers or [nn.BatchNorm1d(4)]), nn.Linear(4, 1)
    ).double()


SYNC = r"wrap_ddp\(sync_batchnorm=True\) or wrap_fsdp\(sync_batchnorm=True\), GroupNorm, or freeze"


@pytest.mark.parametrize(
    ("recipe", "world_size", "text"),
    [
        (
            af.wrap_ddp(),
            2,
            f"got 1 with statistics of the rows of each rank, .* the number of ranks; use {SYNC}",
        ),
        (
            af.accumulate(2),
            1,
            "of each micro-batch, .* numbers of micro-batches and ranks; use GroupNorm, or freeze it",
        ),
        (
            af.compose(af.wrap_ddp(), af.accumulate(2)),
            2,
            f"of each micro-batch and rank, .* use no accumulate, and {SYNC}",
        ),
        (
            af.compose(af.wrap_ddp(sync_batchnorm=True), af.accumulate(2)),
            2,
            "of each micro-batch, .* numbers of micro-batches and ranks; use GroupNorm",
        ),
    ],
)
def test_a_layer_whose_rows_are_cut_is_warned_of_once_with_the_repair(recipe, world_size, text):
    (only,) = warned(recipe, world_size=world_size)
    assert re.search(text, only)


@pytest.mark.parametrize(
    ("recipe", "world_size"),
    [
        (af.accumulate(1), 1),
        (af.wrap_fsdp(sync_batchnorm=True), 2),
        (af.local_sgd(every=2), 2),
    ],
)
def test_a_layer_that_sees_the_whole_batch_is_not_warned_of(recipe, world_size):
    assert warned(recipe, world_size=world_size) == []


class Narrow(nn.Module):
    """Images have a variance in each row; what is pooled to one value a feature has none."""

    def __init__(self, layer):
        super().__init__()
        self.layers = made(layer)
        self.pooled = layer.num_features == 4

    def forward(self, inputs):
        hidden = self.layers[0](inputs)
        if not self.pooled:  # three values a row, as of a sequence
            hidden = hidden[:, None].expand(-1, 3, -1) * torch.arange(1, 4).double()[:, None]
        hidden = self.layers[1](hidden)
        return self.layers[2](hidden if self.pooled else hidden.mean(1))


REFUSED = r"two rows or more in each micro-batch, .* \(layers.1\) .*, got 1 on rank {}; use {}"
OF_RANKS = r"wrap_ddp\(sync_batchnorm=True\) or wrap_fsdp\(sync_batchnorm=True\), "
DROP = "or drop_last=True in the DataLoader"


def ends(recipe, sizes, make=lambda: Narrow(nn.BatchNorm1d(4)), *, world_size=1):
    """Return the error of each rank in a step of its last size of batches; None without one."""

    def run(state):
        model = make()
        plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
        state, step = af.build(recipe(plan), state)
        for size in sizes[:-1]:
            state, _ = step(state, af.shard_batch((X[:size], X[:size, :1]), state))
        before = copy.deepcopy(model.state_dict())
        try:
            step(state, af.shard_batch((X[: sizes[-1]], X[: sizes[-1], :1]), state))
        except ValueError as error:
            ours.assert_close(model.state_dict(), before)
            return error
        return None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simulate(run, world_size=world_size)


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [(af.wrap_fsdp(), [3]), (af.wrap_ddp(), [12, 12, 12, 3])],
    ids=["first batch", "tail"],
)
def test_one_row_of_a_rank_is_refused_on_all_ranks_before_the_forward(recipe, sizes):
    first, second = ends(recipe, sizes, world_size=2)
    assert re.search(REFUSED.format(1, OF_RANKS + DROP), str(second))
    assert "every rank must be able to count its batch; another rank could not" in str(first)
    assert isinstance(first, af.errors.BatchError)


def test_one_row_of_a_micro_batch_is_refused():
    (error,) = ends(af.accumulate(3), [12, 4])
    assert re.search(REFUSED.format(0, f"fewer micro-batches, {DROP}"), str(error))


@pytest.mark.parametrize(
    ("recipe", "make", "world_size"),
    [
        (af.wrap_ddp(), lambda: Narrow(nn.BatchNorm1d(3)), 2),
        (af.wrap_ddp(), lambda: Narrow(nn.BatchNorm1d(4)).eval(), 2),
        (af.wrap_ddp(sync_batchnorm=True), lambda: Narrow(nn.BatchNorm1d(4)), 2),
        (af.accumulate(2), lambda: Narrow(nn.BatchNorm1d(3)), 1),
    ],
    ids=["several values", "frozen", "synced", "several values in a micro-batch"],
)
def test_one_row_that_has_statistics_trains(recipe, make, world_size):
    assert ends(recipe, [12, 3], make, world_size=world_size) == [None] * world_size


class Unused(nn.Module):
    """Holds a layer in training mode that its forward does not call."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = made(nn.Tanh()), nn.BatchNorm1d(4, affine=False).double()

    def forward(self, inputs):
        return self.used(inputs)


@pytest.mark.parametrize(
    "model",
    [lambda: made(nn.GroupNorm(2, 4)), lambda: made(nn.BatchNorm1d(4).eval()), Unused],
    ids=["GroupNorm", "frozen", "unused"],
)
def test_layers_without_statistics_of_rows_are_not_warned_of(model):
    recipe = af.compose(af.wrap_ddp(), af.accumulate(2))
    assert warned(recipe, model, world_size=2) == []


def test_a_layer_that_thaws_later_is_warned_of_at_the_next_look():
    model = made()
    model[1].eval()
    plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
    state, step = af.build(af.accumulate(2)(plan), af.DistState())
    state, _ = step(state, BATCH)
    model.train()
    with pytest.warns(UserWarning, match="should have no BatchNorm in training mode"):
        step(state, BATCH)
