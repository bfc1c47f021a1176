"""build(after=step) and load(match="names"): what goes on, what is new, and what is refused."""

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.errors import AccelError, CheckpointError, PlanError, StateError
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.longer_runs import batches_of

BATCHES = batches_of()
PLAIN = af.compose()


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def started(recipe=PLAIN, *, optimizer=adam, state=None, model=None):
    model = ours.regression_model() if model is None else model
    plan = af.Plan(ours.mse, model, optimizer(model.parameters()))
    return af.build(recipe(plan), af.DistState() if state is None else state)


def go_on(state, step, count=2):
    for batch in BATCHES[state.step : state.step + count]:
        state, _ = step(state, batch)
    return state


def again(state, step, recipe=PLAIN, *, optimizer=adam, model=None):
    model = step.plan.model if model is None else model
    plan = af.Plan(ours.mse, model, optimizer(model.parameters()))
    return af.build(recipe(plan), state, after=step)


def test_a_schedule_by_a_metric_keeps_its_counts_and_its_rates():
    def recipe(optimizer):
        kind = torch.optim.lr_scheduler.ReduceLROnPlateau
        return af.schedule(kind(optimizer, patience=0, factor=0.5), metric=lambda report: 1.0)

    model = ours.regression_model()
    optimizer = adam(model.parameters())
    state, step = af.build(recipe(optimizer)(af.Plan(ours.mse, model, optimizer)), af.DistState())
    state = go_on(state, step, 3)
    assert optimizer.param_groups[0]["lr"] == 0.025
    other = adam([*model.parameters()][::-1])
    plan = recipe(other)(af.Plan(ours.mse, model, other))
    state, step = af.build(plan, state, after=step)
    assert other.param_groups[0]["lr"] == 0.025
    go_on(state, step, 1)
    assert other.param_groups[0]["lr"] == 0.0125


def test_one_schedule_goes_on_for_several_optimizers():
    rates = af.schedule(lambda count: 0.5**count)
    state, step = started(rates)
    state = go_on(state, step)
    model = step.plan.model
    parameters = [*model.parameters()]
    optimizers = {"a": adam(parameters[:2]), "b": adam(parameters[2:])}
    state, step = af.build(rates(af.Plan(ours.mse, model, optimizers)), state, after=step)
    assert [each.param_groups[0]["lr"] for each in optimizers.values()] == [0.025, 0.025]
    assert all(
        float(each.state[p]["step"]) == 2 for each in optimizers.values() for p in each.state
    )
    assert {*optimizers["a"].state} == {*parameters[:2]}


class WithProgress(torch.optim.SGD):
    """Counts its updates in its groups, as schedule-free optimizers do."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group.setdefault("updates_made", 0)

    def step(self, closure=None):
        for group in self.param_groups:
            group["updates_made"] += 1
        return super().step(closure)


def test_what_is_new_is_listed(capsys):
    state, step = started(af.compose(af.ema(0.9), af.skip_nonfinite()))
    state = go_on(state, step)
    model = nn.Sequential(*step.plan.model, nn.Linear(1, 1).double())
    again(state, step, af.ema(0.9), model=model)
    said = capsys.readouterr().err
    assert "build: the run goes on after the step; new are:" in said
    assert "optimizer begins anew for 3.weight, 3.bias" in said
    assert "skip_nonfinite of the run is left out" in said
    assert "average" not in said


def test_parameters_are_matched_by_the_object_before_the_name():
    state, step = started(af.ema(0.5))
    state = go_on(state, step)
    first, _, last = step.plan.model
    model = nn.Sequential(last, first)  # "0" is what was "2"
    moments = step.plan.optimizer.state[last.weight]["exp_avg"].clone()
    _, other = again(state, step, af.ema(0.5), model=model)
    assert other.plan.optimizer.state[last.weight]["exp_avg"].equal(moments)
    with af.averaged(step):
        expected = last.weight.clone()
    with af.averaged(other):
        assert last.weight.equal(expected)


def refusals(state):
    """Make mistakes with `after`, each with the words of the error."""
    narrow = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    other = nn.ModuleDict({"a": nn.Linear(3, 1)}).double()
    return {
        "shapes": (
            narrow,
            state,
            "of the same shapes, got .* for 0.bias, .* here; give the new one",
        ),
        "names": (other, state, "no parameter of this one, neither the object nor its name"),
        "state": (None, af.DistState(), "state must be the one that the last step returned"),
    }


@pytest.mark.parametrize("mistake", ["shapes", "names", "state"])
def test_a_step_of_another_run_is_refused(mistake):
    state, step = started(af.wrap_ddp())
    state = go_on(state, step)
    model, given, text = refusals(state)[mistake]
    with pytest.raises((PlanError, StateError), match=text):
        again(given, step, af.wrap_ddp(), model=model)


def test_a_step_of_another_world_is_refused_on_every_rank():
    state, step = started()
    go_on(state, step)

    def run(state):
        with pytest.raises(StateError, match="after must be a step of the world of the state, got"):
            again(state, step, af.wrap_ddp(), model=ours.regression_model())

    simulate(run, world_size=2)


def test_another_strategy_is_refused_on_every_rank():
    def run(state):
        state, step = started(af.wrap_ddp(), state=state)
        state, _ = step(state, BATCHES[0])
        with pytest.raises(PlanError, match=r"a step of the same strategy, got .*match=.names."):
            again(state, step, af.wrap_fsdp())

    simulate(run, world_size=2)


def test_what_is_no_step_and_state_of_other_shapes_are_refused():
    state, step = started(af.skip_spikes(window=8))
    state = go_on(state, step)
    with pytest.raises(
        TypeError, match=r"build: after must be the step that build gave before, got .int."
    ):
        af.build(step.plan, state, after=3)
    with pytest.raises(
        PlanError, match=r"norms of \[8\] in the step, \[16\] here; give the transform"
    ):
        again(state, step, af.skip_spikes(window=16))
    state, step = started(af.ema(0.5))
    state = go_on(state, step)
    with (
        af.averaged(step),
        pytest.raises(StateError, match="build: step must have its own parameters"),
    ):
        again(state, step, af.ema(0.5))


def test_ranks_between_two_averages_are_refused():
    def run(state):
        state, step = started(af.local_sgd(every=2), state=state)
        state = go_on(state, step, 1)
        with pytest.raises(
            StateError, match="build: state must be one at which local_sgd has averaged"
        ):
            again(state, step, af.local_sgd(every=2))

    simulate(run, world_size=2)


def test_a_load_by_names_that_is_refused_changes_nothing(tmp_path):
    state, step = started(af.ema(0.5))
    af.save(step, go_on(state, step), tmp_path)
    wide = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    state, other = started(af.ema(0.5), model=wide)
    before = {name: each.clone() for name, each in wide.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"model/2.weight: float64 \[1, 5\] saved, .* here"):
        af.load(other, state, tmp_path, match="names")
    ours.assert_identical(dict(wide.state_dict()), before)
    assert not other.plan.optimizer.state
    renamed = nn.ModuleDict({"a": nn.Linear(3, 1)}).double()
    plan = af.Plan(
        lambda model, batch: model["a"](batch[0]).mean(), renamed, adam(renamed.parameters())
    )
    state, other = af.build(plan, af.DistState())
    with pytest.raises(CheckpointError, match="no tensor of the model has a name that was saved"):
        af.load(other, state, tmp_path, match="names")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"match": "objects"}, 'load: match must be "program" or "names", got .objects.'),
        (
            {"match": "names", "schedule": "saved"},
            'schedule must be left out, or "program", beside',
        ),
    ],
)
def test_arguments_of_a_load_by_names_are_checked(tmp_path, options, text):
    state, step = started()
    af.save(step, state, tmp_path)
    with pytest.raises(AccelError, match=text):
        af.load(step, state, tmp_path, **options)


def test_a_load_by_names_lists_what_is_new_and_what_is_left_out(tmp_path, capsys):
    state, step = started(af.compose(af.ema(0.9), af.skip_nonfinite()))
    af.save(step, go_on(state, step), tmp_path)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 1))).double()
    state, other = started(af.compose(af.skip_spikes(), af.ema(0.9)), model=model)
    state = af.load(other, state, tmp_path, match="names")
    said = capsys.readouterr().err
    for line in (
        "model/2.0.weight: begins with the program's values",
        "model/2.weight, model/2.bias of the run: left out",
        "optimizer begins anew for 2.0.weight, 2.0.bias",
        "skip_spikes begins anew",
        "skip_nonfinite of the run is left out",
    ):
        assert line in said
    assert model[0].weight.equal(step.plan.model[0].weight)
    assert state.step == 2
    go_on(state, other)


class Counting(torch.optim.SGD):
    """Keeps a count outside of its `state_dict`."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)


class Honest(Counting):
    def state_dict(self):
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, saved):
        self.count = saved["count"]
        super().load_state_dict({key: saved[key] for key in ("state", "param_groups")})


def sgd_of(kind):
    return lambda parameters: kind(parameters, lr=0.1)


def test_an_optimizer_that_counts_outside_of_its_state_is_warned_of_once(tmp_path):
    state, step = started(optimizer=sgd_of(Counting))
    af.save(step, state, tmp_path)  # nothing has changed yet
    state = go_on(state, step)
    with pytest.warns(UserWarning, match="got Counting, which has changed count and gives"):
        af.save(step, state, tmp_path)
    af.save(step, state, tmp_path)  # a second warning would be an error


@pytest.mark.parametrize("kind", [Honest, torch.optim.Adam, WithProgress])
def test_an_optimizer_that_saves_all_that_it_counts_is_not_warned_of(tmp_path, kind):
    state, step = started(optimizer=sgd_of(kind))
    state = go_on(state, step)
    af.save(step, state, tmp_path)
    _, other = again(state, step, optimizer=sgd_of(kind))
    assert getattr(other.plan.optimizer, "count", 2) == 2
