"""Law 10: the learning rate of an update is a function of the number of updates made before it."""

from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as schedulers

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.laws.law07_scaling import scaled
from tests.support import strategies as ours
from tests.support.schedules import (
    SCHEDULERS,
    Greedy,
    by_device,
    by_host,
    exponential,
    fused,
    fused_sgd,
    plateau,
    scheduled,
    sgd,
)


def warm_up(num_updates):
    """Rise linearly over three updates, then fall."""
    return min((num_updates + 1) / 3, 3 / (num_updates + 1))


def by_hand(batches, skipped, make_scheduler, optimizer):
    """Return the rates of the applied updates, and the parameters, of a plain loop."""
    model = ours.regression_model()
    optimizer = optimizer(model.parameters())
    scheduler = make_scheduler(optimizer)
    rates = []
    for index, batch in enumerate(batches):
        if index in skipped:
            continue
        ours.mse(model, batch).backward()
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return rates, model.state_dict()


@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@ours.share(0.3)
@given(
    batches=strategies.batches(num_batches=6),
    skipped=st.sets(st.integers(0, 5), max_size=3),
    world_size=st.sampled_from([1, 2, 4]),
    num_microbatches=st.sampled_from([1, 4]),
)
def test_the_rate_depends_neither_on_ranks_nor_on_microbatches_nor_on_skipped_updates(
    make_scheduler, batches, skipped, world_size, num_microbatches
):
    expected_rates, expected = by_hand(batches, skipped, make_scheduler, sgd)
    parts = ours.dealt_evenly(batches, world_size)

    def recipe(optimizer):
        return af.compose(
            af.accumulate(num_microbatches),
            af.schedule(make_scheduler(optimizer)),
            af.skip_nonfinite(),
        )

    def run(state):
        return scheduled(state, parts[state.rank], skipped, recipe, sgd)

    for rates, parameters in simulate(run, world_size=world_size):
        assert rates == expected_rates
        ours.assert_close(parameters, expected)


@given(batches=strategies.batches(num_batches=5), skipped=st.sets(st.integers(0, 4), max_size=2))
def test_a_function_is_a_schedule(batches, skipped):
    make_scheduler = partial(schedulers.LambdaLR, lr_lambda=warm_up)
    expected = by_hand(batches, skipped, make_scheduler, sgd)
    recipe = af.compose(af.skip_nonfinite(), af.schedule(warm_up))
    found = scheduled(af.DistState(), batches, skipped, lambda optimizer: recipe, sgd)
    assert found[0] == expected[0]
    ours.assert_identical(found[1], expected[1])


@pytest.mark.parametrize("make", [plateau, Greedy])
@given(batches=strategies.batches(num_batches=6))
def test_a_plateau_is_seen_in_the_loss(make, batches):
    model = ours.regression_model()
    optimizer = sgd(model.parameters())
    scheduler = make(optimizer)
    for batch in batches:
        loss = ours.mse(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(loss.float().item())
    found = scheduled(
        af.DistState(), batches, (), lambda optimizer: af.schedule(make(optimizer)), sgd
    )
    ours.assert_identical(found[1], model.state_dict())


@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@ours.share(0.3)
@given(
    batches=strategies.batches(num_batches=6),
    skipped=st.sets(st.integers(0, 5), max_size=4),
    optimizer=st.sampled_from([fused, fused_sgd]),
    world_size=st.sampled_from([1, 2]),
    num_microbatches=st.sampled_from([1, 4]),
)
def test_a_rate_on_the_device_is_that_of_the_updates_made(
    make_scheduler, batches, skipped, optimizer, world_size, num_microbatches
):
    expected, _ = by_hand(batches, skipped, make_scheduler, optimizer)
    parts = ours.dealt_evenly(batches, world_size)

    def recipe(optimizer):
        return af.compose(
            scaled(8.0), af.accumulate(num_microbatches), by_device(make_scheduler, optimizer)
        )

    def run(state):
        return scheduled(state, parts[state.rank], skipped, recipe, optimizer)[0]

    for rates in simulate(run, world_size=world_size):
        # the rates are kept in float32
        torch.testing.assert_close(rates, expected, rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("make", [by_host, by_device])
@ours.share(0.34)
@given(saved_after=st.integers(0, 5), skipped=st.sets(st.integers(0, 4), max_size=3))
@example(saved_after=3, skipped={2})
def test_schedulers_go_one_after_another(tmp_path_factory, make, saved_after, skipped):
    """Skipped updates and resumed runs are among the cases."""
    folder = tmp_path_factory.mktemp("run")

    def built():
        model = ours.regression_model()
        optimizer = fused(model.parameters())
        both = [make(each, optimizer) for each in (exponential, SCHEDULERS["cosine"])]
        recipe = af.compose(scaled(8.0), *both)
        return *af.build(recipe(af.Plan(ours.mse, model, optimizer)), af.DistState()), optimizer

    def by_hand():
        optimizer = fused(ours.regression_model().parameters())
        both = [each(optimizer) for each in (exponential, SCHEDULERS["cosine"])]
        for index in range(5):
            yield optimizer.param_groups[0]["lr"]
            optimizer.step()
            for each in both if index not in skipped else ():
                each.step()

    state, step, optimizer = built()
    rates = []
    for index in range(5):
        if index == saved_after:
            af.save(step, state, folder)
            state, step, optimizer = built()
            state = af.load(step, state, folder)
        rates.append(float(optimizer.param_groups[0]["lr"]))
        bad = float("inf") if index in skipped else 1.0
        state, _ = step(state, (torch.full((2, 3), bad).double(), torch.ones(2, 1).double()))
    expected = list(by_hand())
    on_device = make is by_device
    # the rate is in float32
    assert rates == (pytest.approx(expected, rel=1e-7) if on_device else expected)


@pytest.mark.parametrize("make", [by_host, by_device])
@given(
    # OneCycleLR moves momentum too, which is a number on the host.
    make_scheduler=st.sampled_from(
        [SCHEDULERS[name] for name in SCHEDULERS if name != "one cycle"]
    ),
    saved_after=st.integers(0, 7),
)
@example(make_scheduler=SCHEDULERS["sequential"], saved_after=3)
def test_a_resumed_run_resumes_with_its_schedule(
    tmp_path_factory, make_scheduler, make, saved_after
):
    """The last update before the stop may have been skipped."""
    folder = tmp_path_factory.mktemp("run")
    batch = (torch.ones(2, 3).double(), torch.ones(2, 1).double())
    bad = (batch[0] * float("inf"), batch[1])
    batches = [batch, batch, bad, batch, bad, batch, batch]

    def built():
        model = ours.regression_model()
        optimizer = fused(model.parameters())
        recipe = af.compose(scaled(8.0), make(make_scheduler, optimizer))
        return *af.build(recipe(af.Plan(ours.mse, model, optimizer)), af.DistState()), optimizer

    def go_on(state, step, optimizer, batches):
        rates = []
        for each in batches:
            rates.append(float(optimizer.param_groups[0]["lr"]))
            state, _ = step(state, each)
        return state, rates

    whole = built()
    _, expected = go_on(*whole, batches)
    state, step, optimizer = built()
    state, _ = go_on(state, step, optimizer, batches[:saved_after])
    af.save(step, state, folder)
    state, step, optimizer = built()
    state = af.load(step, state, folder)
    _, rates = go_on(state, step, optimizer, batches[saved_after:])
    assert rates == expected[saved_after:]
    ours.assert_identical(step.plan.model.state_dict(), whole[1].plan.model.state_dict())
