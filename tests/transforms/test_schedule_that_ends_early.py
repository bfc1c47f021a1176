"""`schedule` warns of a learning rate that has ended at 0 while the run goes on."""

import warnings

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law07_scaling import scaled
from tests.support import strategies as ours
from tests.support.schedules import by_device, fused

BATCH = (torch.ones(4, 3).double(), torch.ones(4, 1).double())
TEXT = "schedule: learning rate should be above 0 while a run trains, got 0 in all groups for 3 updates"


def train(make, num_steps, *, groups=1, recipe=None, state=None, every=None):
    """Train; yield after each step."""
    model = ours.regression_model()
    parameters = [*model.parameters()]
    parts = [{"params": parameters[number::groups]} for number in range(groups)]
    optimizer = torch.optim.SGD(parts, lr=0.1)
    plan = af.schedule(make(optimizer), every=every)(af.Plan(ours.mse, model, optimizer))
    state, step = af.build(plan if recipe is None else recipe(plan), state or af.DistState())
    for number in range(1, num_steps + 1):
        state, _ = step(state, af.shard_batch(BATCH, state))
        yield number


def warned(*args, **options):
    """Train; return the steps that warned of a rate of 0."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = []
        for number in train(*args, **options):
            found += [number for each in caught if TEXT in str(each.message)]
            caught.clear()
    return found


def linear(num_updates):
    return lambda optimizer: lambda done: max(0.0, 1 - done / num_updates)


def test_it_warns_once_at_the_third_update_in_a_row_with_a_rate_of_0():
    # Updates 5, 6 and 7 have a rate of 0.
    assert warned(linear(4), 12) == [7]
    # Three of four updates have a rate of 0.
    assert warned(lambda optimizer: lambda done: float(done % 4 == 0), 12) == [4]


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lambda state: max(0.0, 1 - state.step / 4),
        lambda optimizer: schedulers.LinearLR(optimizer, 1.0, 0.0, total_iters=4),
        lambda optimizer: schedulers.PolynomialLR(optimizer, 4),
    ],
    ids=["state", "LinearLR", "PolynomialLR"],
)
def test_it_warns_of_each_kind_of_schedule(make):
    assert warned(make, 10) == [7]


def test_a_schedule_by_epochs_is_watched_by_updates():
    # Of two batches each: updates 3, 4 and 5 have a rate of 0.
    assert warned(lambda optimizer: lambda epoch: max(0.0, 1.0 - epoch), 8, every=2) == [5]


def test_a_right_schedule_is_not_warned_of():
    assert warned(linear(8), 10) == []  # ends at 0, two updates late
    assert warned(lambda optimizer: lambda done: 0.0 if done < 6 else 1.0, 9) == []  # a warm-up
    assert warned(lambda optimizer: lambda done: float(done % 3 == 0), 12) == []
    assert warned(one_of_two, 9, groups=2) == []


def one_of_two(optimizer):
    """Only one of two groups ends."""
    return schedulers.LambdaLR(optimizer, [lambda done: float(done < 2), lambda done: 1.0])


def test_the_main_rank_alone_warns():
    def run(state):
        return len(list(train(linear(2), 8, recipe=af.wrap_ddp(), state=state)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert simulate(run, world_size=2) == [8, 8]
    assert len([each for each in caught if TEXT in str(each.message)]) == 1


def test_a_rate_on_a_device_is_watched_as_the_host_knows_it():
    """The state begins with a loss scale, and the optimizer is fused: the device chooses the rate."""
    model = ours.regression_model()
    optimizer = fused(model.parameters())
    recipe = af.compose(scaled(8.0), by_device(lambda _: exponential_to_0(optimizer), optimizer))
    state, step = af.build(recipe(af.Plan(ours.mse, model, optimizer)), af.DistState())
    for _ in range(4):
        state, _ = step(state, BATCH)
    with pytest.warns(UserWarning, match=TEXT):
        step(state, BATCH)


def exponential_to_0(optimizer):
    return schedulers.LambdaLR(optimizer, lambda done: float(done < 2))
