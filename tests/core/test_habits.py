"""Habits of loops that are warned of once: a state that stays, and a scheduler that is stepped twice."""

import warnings

import pytest
import torch
from torch.optim import lr_scheduler

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

X = torch.linspace(-1, 1, 24).sin().double().reshape(8, 3)
BATCH = X, X[:, :1]
SAME = (
    "step: state should be the one that the last step returned, got the same one for the third time"
)
TWICE = "step: schedule should be all that steps a scheduler"


def warned(run, *, world_size=1):
    """Return the texts of warnings, which point into this file."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        simulate(run, world_size=world_size)
    found = [each for each in found if "the same rows on all" not in str(each.message)]
    assert all(each.filename == __file__ for each in found)
    return [str(each.message) for each in found]


@pytest.mark.parametrize("world_size", [2])
def test_a_state_that_is_given_for_the_third_time_is_warned_of_once(world_size):
    def run(state, num_steps=5):
        state, step = ours.built(af.wrap_ddp(), state)
        for _ in range(2):
            for _ in range(num_steps):
                after, _ = step(state, BATCH)
            state = after

    (text,) = warned(run, world_size=world_size)
    assert text.startswith(SAME)
    assert text.endswith("write state, report = step(state, batch)")
    assert warned(lambda state: run(state, 2), world_size=world_size) == []


def test_states_that_a_loop_keeps_or_goes_back_to_are_not_warned_of():
    def run(state):
        first, step = ours.built(af.compose(), state)
        state = first
        for _ in range(4):
            state, _ = step(state, BATCH)
        for _ in range(3):
            later, _ = step(first, BATCH)
            step(later, BATCH)
        for _ in range(2):
            step(first, BATCH)
            step(later, BATCH)
            step(later, BATCH)

    assert warned(run) == []


def test_a_state_that_is_kept_over_batches_that_fail_is_not_warned_of():
    def run(state):
        state, step = ours.built(af.compose(), state)
        state, _ = step(state, BATCH)
        for _ in range(4):
            with pytest.raises(RuntimeError):
                step(state, (X[:, :2], X[:, :1]))

    assert warned(run) == []


def test_steps_that_stay_at_a_batch_and_gradients_alone_are_not_warned_of():
    def run(state):
        state, step = ours.built(af.compose(), state)
        for _ in range(4):
            step(state, BATCH, advance=False)
        for _ in range(4):
            step.grads(state, BATCH)

    assert warned(run) == []


def loop(make, given, *, every=None, beside=None, num_steps=6):
    """Train with the schedule `given(scheduler)`, and call `beside(scheduler, number)` in the loop."""

    def run(state):
        model = ours.regression_model()
        optimizer = ours.sgd(model.parameters())
        scheduler = make(optimizer)
        recipe = af.schedule(given(scheduler), every=every)
        plan = af.Plan(ours.mse, model, optimizer)
        state, step = af.build(af.compose(af.wrap_ddp(), recipe)(plan), state)
        for _ in range(num_steps):
            state, report = step(state, BATCH)
            if beside is not None:
                beside(scheduler, report)

    return run


def step_it(scheduler, report):
    scheduler.step()


def exponential(optimizer):
    return lr_scheduler.ExponentialLR(optimizer, 0.9)


def same(scheduler):
    return scheduler


def constant(scheduler):
    return lambda num_updates: 1.0


@pytest.mark.parametrize(
    ("make", "given", "beside", "every", "world_size"),
    [
        (exponential, same, step_it, None, 2),
        (exponential, constant, step_it, 2, 1),
        (lr_scheduler.ReduceLROnPlateau, same, lambda each, r: each.step(r.loss), None, 1),
        (lambda each: lr_scheduler.OneCycleLR(each, 0.1, 40), same, step_it, None, 1),
        (lambda each: lr_scheduler.ChainedScheduler([exponential(each)]), same, step_it, 2, 1),
    ],
    ids=["the same one", "another one", "plateau", "one cycle", "chained"],
)
def test_a_scheduler_that_the_loop_steps_too_is_warned_of_once(
    make, given, beside, every, world_size
):
    (text,) = warned(loop(make, given, every=every, beside=beside), world_size=world_size)
    assert text.startswith(TWICE)
    assert "leave scheduler.step() out of the loop" in text


def set_by_hand(scheduler, report):
    for group in scheduler.optimizer.param_groups:
        group["lr"] = 0.025


@pytest.mark.parametrize("beside", [None, set_by_hand])
@pytest.mark.parametrize("make", [exponential, lr_scheduler.ReduceLROnPlateau])
def test_schedules_alone_and_rates_that_are_set_by_hand_are_not_warned_of(make, beside):
    assert warned(loop(make, same, beside=beside)) == []


@pytest.mark.parametrize("finds", [False, True])
def test_parameters_that_ranks_would_wait_for_are_warned_of_once_on_one_process(finds):
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 1), "unused": torch.nn.Linear(3, 1)})
    plan = af.Plan(
        lambda model, batch: model["used"](batch).square().mean(),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    wrap = af.wrap_ddp(find_unused_parameters=True) if finds else af.wrap_ddp()
    state, step = af.build(wrap(plan), af.DistState())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            state, _ = step(state, torch.ones(4, 3))
    texts = [
        str(each.message) for each in found if "should reach all parameters" in str(each.message)
    ]
    assert len(texts) == (0 if finds else 1)
    assert all("unused.weight, unused.bias, which wrap_ddp refuses" in text for text in texts)
    listed = "unused     unused.weight, unused.bias, which wrap_ddp refuses on several ranks"
    assert (listed in af.explain(step, state)) != finds
