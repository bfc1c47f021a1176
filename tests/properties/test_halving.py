"""accumulate("auto"): out of memory on any rank, all do the batch again as if nothing had happened."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accel_fn as af
from accel_fn._batch import split_batch
from accel_fn.testing import simulate, strategies
from tests import strategies as ours
from tests.properties.test_scaling import scaled

FULL = {
    "accelerator": lambda: torch.OutOfMemoryError("Tried to allocate 20.00 MiB"),
    "host": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."),
    "python": MemoryError,
}


class FailingBackward(torch.autograd.Function):
    """The identity, whose backward finds no memory."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise FULL["accelerator"]()


class Centred(nn.Module):
    """Without a running mean, which moves in a forward that fails, too. (BatchNorm refuses one sample.)"""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5).double())

    def forward(self, inputs):
        self.mean.lerp_(inputs.detach().mean(dim=0), 0.5)
        return inputs - self.mean.clone()


def model_with_statistics():
    model = ours.regression_model()
    return nn.Sequential(model[0], Centred(), *model[1:])


def limited(limit, where="after", full=FULL["accelerator"]):
    """A loss that takes at most so many samples at a time, and notices before, after or in the backward."""

    def loss_fn(model, batch):
        too_many = limit is not None and len(batch[0]) > limit
        if too_many and where == "before":
            raise full()
        loss = ours.mse(model, batch)
        if too_many and where == "after":
            raise full()
        return FailingBackward.apply(loss) if too_many else loss

    return loss_fn


def train(state, parts, loss_fn, recipe):
    model = model_with_statistics()
    plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()))
    state, step = af.build(state, af.compose(af.wrap_ddp(), recipe)(plan))
    reports = []
    for part in parts:
        state, report = step(state, part)
        reports.append(report)
    return reports, {name: value.clone() for name, value in model.state_dict().items()}, state


def cut_into(counts):
    """So many micro-batches of each batch in turn."""
    left = iter(counts)
    return af.accumulate(1, split=lambda batch: split_batch(batch, num_parts=next(left)))


def assert_same_runs(runs, expected, counts):
    """Bit for bit, of every rank: parameters, losses and scale, after so many micro-batches of each batch."""
    for (reports, actual, state), (plain, parameters, other) in zip(runs, expected, strict=True):
        ours.assert_identical(actual, parameters)
        assert [float(each.loss) for each in reports] == [float(each.loss) for each in plain]
        assert [report.extras["num_microbatches"] for report in reports] == counts
        if state.scaler:
            assert float(state.scaler.scale) == float(other.scaler.scale)


@ours.share(0.32)
@given(
    batches=strategies.batches(num_batches=3),
    world_size=st.sampled_from([1, 2, 4]),
    culprit=st.integers(0, 3),
    limit=st.integers(1, 4),
    where=st.sampled_from(["before", "after", "backward"]),
    recipe=st.sampled_from([af.compose(), af.clip(0.1), scaled(8.0)]),
)
def test_it_is_the_run_that_had_as_many_micro_batches_from_the_start_to_the_bit(
    batches, world_size, culprit, limit, where, recipe
):
    parts = ours.dealt_evenly(batches, world_size)

    def found(state):
        loss_fn = limited(limit if state.rank == culprit % world_size else None, where)
        return train(state, parts[state.rank], loss_fn, af.compose(recipe, af.accumulate("auto")))

    runs = simulate(found, world_size=world_size)
    counts = [report.extras["num_microbatches"] for report in runs[0][0]]
    assert counts == sorted(counts)
    mine = [len(part[0]) for part in parts[culprit % world_size]]
    largest = max(-(-size // count) for size, count in zip(mine, counts, strict=True))
    assert largest <= limit

    def expected(state):
        return train(state, parts[state.rank], ours.mse, af.compose(recipe, cut_into(counts)))

    assert_same_runs(runs, simulate(expected, world_size=world_size), counts)


@pytest.mark.parametrize("full", FULL.values(), ids=FULL)
def test_random_generators_are_where_they_were(full):
    """Dropout, NumPy's noise and Python's."""

    def run(loss_fn, recipe):
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        model = ours.regression_model()
        plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()))
        state, step = af.build(af.DistState(), recipe(plan))
        for _ in range(3):
            state, _ = step(state, (torch.ones(8, 3).double(), torch.ones(8, 1).double()))
        return model.state_dict(), torch.rand(3), np.random.rand(), random.random()

    def noisy(loss_fn):
        def with_noise(model, batch):
            inputs = nn.functional.dropout(batch[0], 0.5) + np.random.rand() + random.random()
            return loss_fn(model, (inputs, batch[1]))

        return with_noise

    parameters, *drawn = run(noisy(limited(3, full=full)), af.accumulate("auto"))
    expected, *numbers = run(noisy(ours.mse), af.accumulate(4))
    ours.assert_identical(parameters, expected)
    assert torch.equal(drawn[0], numbers[0])
    assert drawn[1:] == numbers[1:]


def test_it_says_so_once_and_remembers(capsys):
    batch = (torch.ones(8, 3).double(), torch.ones(8, 1).double())

    def run(state):
        loss_fn = limited(2 if state.rank == 1 else None)
        reports, _, _ = train(state, [batch] * 3, loss_fn, af.accumulate("auto"))
        return [report.extras["num_microbatches"] for report in reports]

    assert simulate(run, world_size=2) == [[4, 4, 4]] * 2
    assert capsys.readouterr().err.splitlines() == [
        f"accel_fn: out of memory on rank 1 at step 1; going on with {count} micro-batches"
        for count in (2, 4)
    ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_sample_that_is_too_much_is_an_error_on_every_rank(world_size):
    def run(state):
        loss_fn = limited(0 if state.rank == world_size - 1 else None)
        words = f"micro-batches of one sample, got on rank {world_size - 1}: Tried to allocate"
        batch = (torch.ones(3, 3).double(), torch.ones(3, 1).double())
        with pytest.raises(MemoryError, match=words):
            train(state, [batch], loss_fn, af.accumulate("auto"))

    simulate(run, world_size=world_size)


def test_another_error_is_not_tried_again():
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        raise RuntimeError("shapes do not fit")

    model = ours.regression_model()
    plan = af.Plan(loss_fn, model, ours.adamw(model.parameters()))
    state, step = af.build(af.DistState(), af.accumulate("auto")(plan))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        step(state, (torch.ones(4, 3).double(), torch.ones(4, 1).double()))
    assert len(calls) == 1


def test_parameters_that_the_loss_misses_are_refused_as_without_it():
    def loss_fn(model, batch):
        return model[0](batch[0]).square().mean()

    def run(state):
        batch = (torch.ones(4, 3).double(), torch.ones(4, 1).double())
        with pytest.raises(ValueError, match=r"got no gradient for 3\.weight"):
            train(state, [batch], loss_fn, af.accumulate("auto"))

    simulate(run, world_size=2)


def test_it_cuts_by_rows_alone():
    with pytest.raises(ValueError, match='split must be "rows" where num_microbatches is "auto"'):
        af.accumulate("auto", split=None)
