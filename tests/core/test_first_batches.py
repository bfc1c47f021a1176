"""Checks of the first batches: the model's mode, equal batches, buffers that a forward writes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import accel_fn as af
from accel_fn.testing import simulate

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def built(state, recipe, model):
    plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return af.build(recipe(plan), state)


def test_a_model_that_an_evaluation_left_in_evaluation_mode_is_warned_of_once():
    model = nn.Linear(4, 1).double()
    state, step = built(af.DistState(), af.compose(), model)
    for _ in range(3):
        state, _ = step(state, X)
    model.eval()
    with pytest.warns(UserWarning, match="step: model should be in training mode") as warned:
        state, _ = step(state, X)
    step(state, X)  # a warning would be an error here
    assert [each.filename for each in warned] == [__file__]


EQUAL = (
    r"step: batch should be this rank's part of the global batch, got the same rows on all 2 ranks, "
    r"each of which does all the work; give the DataLoader to shard_loader, or cut the batch by part"
)


def test_equal_batches_on_all_ranks_are_warned_of_once_on_the_main_rank():
    def run(state):
        torch.manual_seed(0)
        state, step = built(state, af.wrap_ddp(), nn.Linear(4, 1).double())
        for _ in range(3):
            state, report = step(state, X)
        return report.weight

    with pytest.warns(UserWarning, match=EQUAL) as warned:
        assert simulate(run, world_size=2) == [24, 24]
    assert len(warned) == 1


@pytest.mark.parametrize("batch", [X[:0], X])
def test_parts_and_empty_batches_are_not_warned_of(batch):
    def run(state):
        state, step = built(state, af.wrap_ddp(), nn.Linear(4, 1).double())
        step(state, af.shard_batch(batch, state))

    simulate(run, world_size=2)


class Codes(nn.Module):
    """A codebook that follows the mean of what it is given."""

    def __init__(self, state=None, persistent=True) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1).double()
        self.state = state
        mean = torch.zeros(4, dtype=torch.float64)
        self.register_buffer("mean", mean, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        total, count = x.detach().sum(0), len(x)
        if self.state is not None:
            total, count = af.reduce_sum((total, count), self.state)
        self.mean.mul_(0.9).add_(total / max(count, 1), alpha=0.1)
        return self.layer(x - self.mean)


WRITTEN = (
    r"step: model should write the same in its forward however a batch is cut, got mean, written"
)


@pytest.mark.parametrize(
    ("recipe", "world_size", "reduces"),
    [
        (af.accumulate(2), 1, False),
        (af.wrap_fsdp(), 2, False),
        (af.compose(af.wrap_ddp(), af.accumulate(2)), 2, True),
    ],
)
@pytest.mark.filterwarnings("ignore:step. loss_fn should return the mean")
def test_buffers_that_a_forward_writes_are_warned_of_where_batches_are_cut(
    recipe, world_size, reduces
):
    def run(state):
        torch.manual_seed(0)
        state, step = built(state, recipe, Codes(state if reduces else None))
        for _ in range(2):
            state, _ = step(state, af.shard_batch(X, state))

    with pytest.warns(UserWarning, match=WRITTEN) as warned:
        simulate(run, world_size=world_size)
    assert sum("should write the same" in str(each.message) for each in warned) == 1


@pytest.mark.parametrize(
    ("recipe", "world_size"), [(af.compose(), 1), (af.compose(af.wrap_ddp(), af.accumulate(1)), 2)]
)
def test_buffers_that_do_not_depend_on_the_cut_are_not_warned_of(recipe, world_size):
    def run(state):
        torch.manual_seed(0)
        model = Codes(state if world_size > 1 else None)
        state, step = built(state, recipe, model)
        for _ in range(2):
            state, _ = step(state, af.shard_batch(X, state))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="step: loss_fn should return the mean")
        simulate(run, world_size=world_size)
