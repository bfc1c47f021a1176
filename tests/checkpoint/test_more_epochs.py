"""A run that resumes with more epochs: single cases of schedules, and what is refused."""

import re

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import accel_fn as af
from accel_fn.testing import simulate
from tests.laws.law07_scaling import scaled
from tests.support import strategies as ours
from tests.support.longer_runs import (
    LONG,
    SHORT,
    WITH_LENGTH,
    ByHand,
    batches_of,
    built,
    falling,
    go_on,
    parameters_of,
    sequential,
    sgd,
)
from tests.support.schedules import Advance, late


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


@pytest.mark.parametrize(("make", "name"), WITH_LENGTH.values(), ids=WITH_LENGTH)
def test_another_length_is_refused_on_every_rank_and_changes_nothing(tmp_path, make, name):
    def first(state):
        state, step = built(state, make, "wrap_ddp", 1, SHORT)
        state, _ = go_on(state, step, batches_of()[:3])
        af.save(step, state, tmp_path)

    def second(state):
        state, step = built(state, make, "wrap_ddp", 1, LONG)
        before = parameters_of(step), step.plan.optimizer.param_groups[0]["lr"]
        with pytest.raises(RuntimeError) as error:
            af.resume(step, state, tmp_path)
        ours.assert_identical(parameters_of(step), before[0])
        assert step.plan.optimizer.param_groups[0]["lr"] == before[1]
        return str(error.value)

    simulate(first, world_size=2)
    numbers = {"_milestones": (r"\[3\]", r"\[5\]"), "milestones": (r"\[4\]", r"\[7\]")}
    saved, here = numbers.get(name, (SHORT, LONG))
    text = (
        rf"after_update/\d schedule\(\w+\): {name} {saved} saved, {here} here; give "
        'schedule="program" to follow that of this program, or schedule="saved"'
    )
    for found in simulate(second, world_size=2):
        assert re.search(text, found)


def on_device(make, length):
    """Build a run whose rates are tensors, as on an accelerator."""
    model = ours.regression_model()
    optimizer = fused(model.parameters())
    made = make(optimizer, length)
    scheduler = schedulers.LambdaLR(optimizer, made) if callable(made) else made
    recipe = af.compose(scaled(8.0), late(Advance(scheduler)))
    return af.build(recipe(af.Plan(ours.mse, model, optimizer)), af.DistState())


ON_DEVICE = {
    "cosine": (schedulers.CosineAnnealingLR, "program"),
    "sequential": (sequential, "program"),
    "function": (lambda o, n: falling(n), None),
}


@pytest.mark.parametrize(("make", "choice"), ON_DEVICE.values(), ids=ON_DEVICE)
@pytest.mark.parametrize("bad", [(4,), (1, 4, 5)])
def test_rates_on_the_device_are_those_of_the_longer_program(tmp_path, make, choice, bad):
    batches = batches_of(bad)
    expected = ByHand(make, fused)
    expected.train(batches[:5])
    expected.lengthen()
    expected.train(batches[5:])
    state, step = on_device(make, SHORT)
    state, rates = go_on(state, step, batches[:5])
    af.save(step, state, tmp_path)
    state, step = on_device(make, LONG)
    state = af.load(step, state, tmp_path, schedule=choice)
    assert isinstance(step.plan.optimizer.param_groups[0]["lr"], torch.Tensor)
    _, more = go_on(state, step, batches[5:])
    assert rates + more == pytest.approx(expected.rates, rel=1e-6)  # rates are in float32


def test_each_of_two_optimizers_follows_the_program(tmp_path):
    def built(length):
        model = ours.regression_model()
        optimizers = {"a": sgd(model[0].parameters()), "b": sgd(model[2].parameters())}
        recipe = af.compose(
            af.schedule(schedulers.PolynomialLR(optimizers["a"], length)),
            af.schedule(falling(length), optimizer="b"),
        )
        return af.build(recipe(af.Plan(ours.mse, model, optimizers)), af.DistState())

    def rates(state, step, batches):
        found = []
        for batch in batches:
            found.append([each.param_groups[0]["lr"] for each in step.plan.optimizers.values()])
            state, _ = step(state, batch)
        return state, found

    batches = batches_of()
    state, step = built(SHORT)
    state, _ = rates(state, step, batches[:4])
    af.save({"one": step}, state, tmp_path)
    _, expected = rates(*built(LONG), batches)
    state, step = built(LONG)
    text = r"0 schedule\(PolynomialLR\) of step 'one' of a: total_iters 9 saved, 15 here; give"
    with pytest.raises(RuntimeError, match=text):
        af.load({"one": step}, state, tmp_path)
    state = af.load({"one": step}, state, tmp_path, schedule="program")
    assert rates(state, step, batches[4:])[1] == expected[4:]


def test_a_schedule_of_epochs_goes_on_from_the_saved_epoch(tmp_path):
    def built(length):
        plan = ours.plan(optimizer=sgd)
        cosine = schedulers.CosineAnnealingLR(plan.optimizer, length)
        return af.build(af.schedule(cosine, every=2)(plan), af.DistState())

    batches = batches_of()
    state, step = built(3)
    state, _ = go_on(state, step, batches[:6])
    af.save(step, state, tmp_path)
    _, expected = go_on(*built(6), batches)
    state, step = built(6)
    state = af.load(step, state, tmp_path, schedule="program")
    assert go_on(state, step, batches[6:])[1] == expected[6:]


def by_loop(length):
    """Build a run whose loop steps the scheduler."""
    plan = ours.plan(optimizer=sgd)
    scheduler = schedulers.CosineAnnealingLR(plan.optimizer, length)
    return (*af.build(plan, af.DistState()), scheduler)


def stepped(state, step, scheduler, batches):
    rates = []
    for batch in batches:
        rates.append(step.plan.optimizer.param_groups[0]["lr"])
        state, _ = step(state, batch)
        scheduler.step()
    return state, rates


@pytest.mark.parametrize("choice", ["program", "saved"])
def test_a_scheduler_among_the_extras_is_compared_and_followed_too(tmp_path, choice):
    batches = batches_of()
    state, step, scheduler = by_loop(SHORT)
    state, _ = stepped(state, step, scheduler, batches[:4])
    af.save(step, state, tmp_path, extras={"rate": scheduler})
    _, expected = stepped(*by_loop(LONG if choice == "program" else SHORT), batches)
    state, step, scheduler = by_loop(LONG)
    with pytest.raises(RuntimeError, match="extras/rate: T_max 9 saved, 15 here; give schedule="):
        af.load(step, state, tmp_path, extras={"rate": scheduler})
    assert (scheduler.last_epoch, scheduler.T_max) == (0, LONG)
    state = af.load(step, state, tmp_path, extras={"rate": scheduler}, schedule=choice)
    assert stepped(state, step, scheduler, batches[4:])[1] == expected[4:]


def refused(folder, make, text, *, trained=0, error=RuntimeError, choice="program"):
    """Save after 5 updates of one schedule; another one cannot be stepped there, and stays."""
    first, second = make
    state, step = built(af.DistState(), first, "wrap_ddp", 1, SHORT)
    state, _ = go_on(state, step, batches_of()[:5])
    af.save(step, state, folder)
    state, step = built(af.DistState(), second, "wrap_ddp", 1, SHORT)
    _, _ = go_on(state, step, batches_of()[:trained])
    before = parameters_of(step), dict(step.plan.optimizer.param_groups[0])
    with pytest.raises(error, match=text):
        af.load(step, state, folder, schedule=choice)
    ours.assert_identical(parameters_of(step), before[0])
    assert step.plan.optimizer.param_groups[0] == before[1]


def plateau(optimizer, _):
    return schedulers.ReduceLROnPlateau(optimizer)


def greedy(optimizer, _):
    import transformers  # takes seconds, which each worker that collects would pay

    return transformers.get_scheduler("greedy", optimizer)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (plateau, "ReduceLROnPlateau"),
        pytest.param(greedy, "GreedyLR", marks=pytest.mark.slow),
    ],
)
def test_a_schedule_that_follows_a_metric_cannot_be_stepped_to_an_update(tmp_path, make, kind):
    text = f'{kind} follows metrics, which are not saved; give schedule="saved"'
    refused(tmp_path, (make, make), text)


def test_a_schedule_that_ends_before_the_saved_update_is_refused(tmp_path):
    make = [lambda o, n, m=m: schedulers.OneCycleLR(o, 0.2, total_steps=m) for m in (9, 4)]
    refused(tmp_path, make, "5 steps saved, total_steps 4 here; make it longer")


def test_a_program_beyond_the_saved_update_is_refused(tmp_path):
    make = [schedulers.CosineAnnealingLR] * 2
    refused(tmp_path, make, "5 steps saved, 6 here; build the program again", trained=6)


def test_a_function_that_fails_at_the_saved_update_leaves_the_program_as_it_was(tmp_path):
    make = [lambda o, n: falling(n), lambda o, n: lambda m: float("nan") if m == 5 else 1.0]
    text = "must give a finite number, after 5 updates, got nan"
    refused(tmp_path, make, text, error=ValueError, choice=None)


def test_a_scheduler_among_the_extras_that_fails_on_its_way_stays_as_it_was(tmp_path):
    def built(function):
        plan = ours.plan(optimizer=sgd)
        scheduler = schedulers.LambdaLR(plan.optimizer, function)
        return (*af.build(plan, af.DistState()), scheduler)

    def failing(number):
        if number == 4:
            raise ValueError("beyond the end")
        return 1 / (1 + number)

    state, step, scheduler = built(falling(LONG))
    state, _ = stepped(state, step, scheduler, batches_of()[:5])
    af.save(step, state, tmp_path, extras={"rate": scheduler})
    state, step, scheduler = built(failing)
    with pytest.raises(RuntimeError, match="beyond the end"):
        af.load(step, state, tmp_path, extras={"rate": scheduler}, schedule="program")
    assert (scheduler.last_epoch, step.plan.optimizer.param_groups[0]["lr"]) == (0, 0.1)


@pytest.mark.parametrize("call", [af.load, af.resume])
def test_schedule_is_one_of_two_words(tmp_path, call):
    state, step = af.build(ours.plan(), af.DistState())
    text = f'{call.__name__}: schedule must be "saved" or "program", or left out, got \'both\''
    with pytest.raises(ValueError, match=text):
        call(step, state, tmp_path, schedule="both")


@pytest.mark.parametrize("call", [af.load, af.resume])
def test_ranks_that_choose_otherwise_are_refused(tmp_path, call):
    def run(state):
        state, step = af.build(af.wrap_ddp()(ours.plan()), state)
        choice = ("saved", "program")[state.rank]
        with pytest.raises(ValueError, match="schedule must be the same on every rank"):
            call(step, state, tmp_path, schedule=choice)

    simulate(run, world_size=2)
