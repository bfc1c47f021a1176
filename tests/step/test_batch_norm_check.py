"""The step warns once of BatchNorm in training mode where its rows are cut, and of no other."""

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
        state, step = af.build(state, recipe(af.Plan(ours.mse, mine, ours.sgd(mine.parameters()))))
        for _ in range(num_steps):
            state, _ = step(state, af.part(BATCH, state))

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
        (af.wrap_ddp(), 2, f"got 1 with statistics of the rows of each rank, .* use {SYNC}"),
        (af.wrap_fsdp(), 3, f"of each rank, .* use {SYNC}"),
        (
            af.accumulate(2),
            1,
            r"of each micro-batch, .* number; use GroupNorm, or freeze it by eval",
        ),
        (
            af.compose(af.wrap_ddp(), af.accumulate(2)),
            2,
            f"of each micro-batch and rank, .* use no accumulate, and {SYNC}",
        ),
        (
            af.compose(af.wrap_ddp(sync_batchnorm=True), af.accumulate(2)),
            2,
            "of each micro-batch, .* number; use GroupNorm",
        ),
    ],
)
def test_a_layer_whose_rows_are_cut_is_warned_of_once_with_the_repair(recipe, world_size, text):
    (only,) = warned(recipe, world_size=world_size)
    assert re.search(text, only)


@pytest.mark.parametrize(
    ("recipe", "world_size"),
    [
        (af.compose(), 1),
        (af.wrap_ddp(), 1),
        (af.accumulate(1), 1),
        (af.wrap_ddp(sync_batchnorm=True), 2),
        (af.wrap_fsdp(sync_batchnorm=True), 2),
        (af.local_sgd(every=2), 2),
    ],
)
def test_a_layer_that_sees_the_whole_batch_is_not_warned_of(recipe, world_size):
    assert warned(recipe, world_size=world_size) == []


class Unused(nn.Module):
    """Holds a layer in training mode that its forward does not call."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = made(nn.Tanh()), nn.BatchNorm1d(4, affine=False).double()

    def forward(self, inputs):
        return self.used(inputs)


@pytest.mark.parametrize(
    "model",
    [
        lambda: made(nn.GroupNorm(2, 4)),
        lambda: made(nn.BatchNorm1d(4).eval()),
        lambda: made(nn.LayerNorm(4)),
        Unused,
    ],
    ids=["GroupNorm", "frozen", "LayerNorm", "unused"],
)
def test_layers_without_statistics_of_rows_are_not_warned_of(model):
    recipe = af.compose(af.wrap_ddp(), af.accumulate(2))
    assert warned(recipe, model, world_size=2) == []


@pytest.mark.parametrize("trains", [True, False])
def test_a_layer_without_running_statistics_is_warned_of_in_any_mode(trains):
    def model():
        return made(nn.BatchNorm1d(4, track_running_stats=False).train(trains))

    texts = warned(af.wrap_ddp(), model, world_size=2)  # the check of the loss warns of it too
    assert sum("should have no BatchNorm in training mode" in each for each in texts) == 1


def test_a_layer_that_thaws_later_is_warned_of_at_the_next_look():
    model = made()
    model[1].eval()
    plan = af.Plan(ours.mse, model, ours.sgd(model.parameters()))
    state, step = af.build(af.DistState(), af.accumulate(2)(plan))
    state, _ = step(state, BATCH)
    model.train()
    with pytest.warns(UserWarning, match="should have no BatchNorm in training mode"):
        step(state, BATCH)
