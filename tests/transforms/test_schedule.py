"""schedule: plateaus, rates on the device, resumed runs, and what is refused."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import accel_fn as af
from accel_fn.testing.internals import place_of_rate
from tests.laws.law07_scaling import scaled
from tests.support import strategies as ours
from tests.support.schedules import (
    SCHEDULERS,
    Greedy,
    by_device,
    exponential,
    fused,
    fused_sgd,
    plateau,
    scheduled,
    sgd,
)


def test_a_plateau_is_seen_in_the_users_metric():
    said = iter([1.0, 0.5, 0.5, 0.5, 0.4])

    def recipe(optimizer):
        scheduler = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return af.schedule(scheduler, metric=lambda report: next(said))

    batch = (torch.ones(2, 3).double(), torch.ones(2, 1).double())
    rates, _ = scheduled(af.DistState(), [batch] * 5, (), recipe, sgd)
    assert rates == [0.05, 0.05, 0.05, 0.025, 0.0125]


SCALE = af.extend.LossScale.start(8.0)

META = af.DistState(device="meta")
SCALED = af.DistState(device="meta", scaler=SCALE)
PLACES = {
    "cpu": (af.DistState(scaler=SCALE), fused, af.compose(), "host"),
    "nothing is skipped": (META, fused, af.compose(), "host"),
    "a loss scale": (SCALED, fused, af.compose(), "device"),
    "a verdict": (META, fused_sgd, af.skip_nonfinite(), "device"),
    "the host waits": (SCALED, sgd, af.compose(), "host"),
}


def place_of(state, plan, make_scheduler, device):
    for group in plan.optimizer.param_groups:
        group["params"] = [nn.Parameter(each.detach().to(device)) for each in group["params"]]
    (begin,) = af.schedule(make_scheduler(plan.optimizer))(plan).after_update
    return place_of_rate(begin(state, plan))


@pytest.mark.parametrize("make_scheduler", [exponential, plateau, Greedy])
@pytest.mark.parametrize(("state", "optimizer", "recipe", "place"), PLACES.values(), ids=PLACES)
def test_a_rate_is_on_the_device_where_that_knows_first_whether_updates_are_made(
    state, optimizer, recipe, place, make_scheduler
):
    plan = recipe(ours.plan(optimizer=optimizer))
    assert place_of(state, plan, make_scheduler, state.device) == place


def test_a_rate_is_on_the_host_where_the_parameters_are():
    """A kernel on the host, of offloaded parameters, reads a rate before it arrives there."""
    assert place_of(SCALED, ours.plan(optimizer=fused), exponential, "cpu") == "host"


def test_a_resumed_run_resumes_from_the_rate_as_the_host_knows_it(tmp_path):
    """The device's value is rounded to float32, and would stay rounded."""

    def built():
        model = ours.regression_model()
        optimizer = fused(model.parameters())
        slow = lambda optimizer: schedulers.ExponentialLR(optimizer, 0.999)
        recipe = af.compose(scaled(8.0), by_device(slow, optimizer))
        return *af.build(recipe(af.Plan(ours.mse, model, optimizer)), af.DistState()), optimizer

    batch = (torch.ones(2, 3).double(), torch.ones(2, 1).double())
    state, step, whole = built()
    for _ in range(30):
        state, _ = step(state, batch)
    af.save(step, state, tmp_path)
    _, again, resumed = built()
    resumed_state = af.load(again, state, tmp_path)
    for _ in range(40):
        state, _ = step(state, batch)
        resumed_state, _ = again(resumed_state, batch)
        assert torch.equal(resumed.param_groups[0]["lr"], whole.param_groups[0]["lr"])


def refused(given_, text, error=ValueError, **options):
    model = ours.regression_model()
    optimizer = sgd(model.parameters())
    plan = af.Plan(ours.mse, model, optimizer)
    with pytest.raises(error, match=text):
        af.build(af.schedule(given_(optimizer), **options)(plan), af.DistState())


def half(num_updates):
    return 0.5**num_updates


def scheduled_by(*makers):
    model = ours.regression_model()
    optimizer = sgd(model.parameters())
    given = [make(optimizer) for make in makers]
    return af.compose(*map(af.schedule, given))(af.Plan(ours.mse, model, optimizer))


def test_a_rate_that_is_set_by_hand_is_taken_up_on_the_device():
    """Loading an optimizer that another library saved has the same effect."""
    model = ours.regression_model()
    optimizer = fused(model.parameters())
    recipe = af.compose(scaled(8.0), by_device(exponential, optimizer))
    state, step = af.build(recipe(af.Plan(ours.mse, model, optimizer)), af.DistState())
    batch = (torch.ones(2, 3).double(), torch.ones(2, 1).double())
    state, _ = step(state, batch)
    optimizer.param_groups[0]["lr"] = 0.5
    step(state, batch)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


@pytest.mark.parametrize(
    "makers",
    [
        (lambda _: half, exponential),
        (exponential, lambda _: half),
        (lambda _: half, lambda _: half),
    ],
    ids=["first", "second", "both"],
)
def test_a_function_is_the_only_schedule_of_a_plan(makers):
    """A second function would overwrite the rate of the first."""
    plan = scheduled_by(*makers)
    with pytest.raises(ValueError, match=r"schedule must stand alone .* got 2 schedules; give one"):
        af.build(plan, af.DistState())


def test_a_scheduler_over_another_optimizer_is_refused():
    other = sgd(ours.regression_model().parameters())
    text = "must be over the plan's optimizer, got a ExponentialLR over another SGD"
    refused(lambda optimizer: schedulers.ExponentialLR(other, 0.9), text)


def test_what_is_no_schedule_is_refused():
    refused(lambda optimizer: 0.1, "be a learning-rate scheduler or a function", TypeError)


def test_a_metric_is_for_a_plateau_alone():
    refused(SCHEDULERS["steps"], "metric must be given for a scheduler that takes one", metric=len)


def test_a_multiplier_must_be_a_number():
    refused(lambda optimizer: lambda n: float("nan"), "a finite number, after 0 updates, got nan")
