"""ema and swa: what shows, saves and restores the averaged parameters, and what it refuses."""

import copy
from contextlib import nullcontext, suppress

import pytest
import torch

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.averages import BATCH, by_hand, each_rule, make, means
from tests.support.late_reads import read_late


def test_an_update_that_is_not_read_yet_does_not_count_in_a_state_that_is_loaded():
    state, step = make(af.compose(af.swa(), af.skip_nonfinite()))
    average = step.plan.after_update[0]
    read_late(average)
    state, _ = step(state, BATCH)
    saved = copy.deepcopy(average.state_dict())
    step(state, BATCH)
    average.load_state_dict(saved)
    assert average.state_dict()["num_updates"] == 1


def test_after_showing_it_all_is_as_it_was_even_after_an_error():
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )
    state, step = make(af.ema(0.5), model=model.double())
    for _ in range(3):
        state, _ = step(state, BATCH)
    before = copy.deepcopy(model.state_dict())
    with suppress(KeyError), af.averaged(step):
        assert not torch.equal(model[0].weight, before["0.weight"])
        torch.testing.assert_close(model[1].running_mean, before["1.running_mean"])
        model(torch.randn(8, 3).double())  # changes running statistics
        raise KeyError
    ours.assert_identical(model.state_dict(), before)


def test_before_the_first_update_the_average_is_the_parameters_as_they_are(tmp_path):
    """A loaded checkpoint replaces the parameters of `build`; the first update may also have been
    skipped."""
    state, step = make(af.compose(af.ema(0.5), af.skip_nonfinite()))
    af.save_model(ours.regression_model(3), tmp_path)
    af.load_model(step.plan.model, tmp_path)
    ours.assert_identical(means(step), ours.regression_model(3).state_dict())
    state, report = step(state, (BATCH[0] * float("nan"), BATCH[1]))
    assert not report.applied
    ours.assert_identical(means(step), ours.regression_model(3).state_dict())


def test_a_new_average_of_a_run_that_resumes_is_that_of_the_run(tmp_path):
    state, step = make(af.compose())
    state, _ = step(state, BATCH)
    af.save(step, state, tmp_path)
    expected = copy.deepcopy(step.plan.model.state_dict())
    state, step = make(af.ema(0.5))
    af.load(step, state, tmp_path, strict=False)
    ours.assert_identical(means(step), expected)


def test_parameters_that_are_no_numbers_to_average_are_left_alone(tmp_path):
    model = ours.regression_model()
    for name, value in {"codes": torch.arange(3), "mask": torch.ones(2).bool()}.items():
        model.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    trained = [each for each in model.parameters() if each.requires_grad]
    plan = af.ema(0.5)(af.Plan(ours.mse, model, ours.adamw(trained)))
    state, step = af.build(plan, af.DistState())
    for _ in range(2):
        state, _ = step(state, BATCH)
    with af.averaged(step):
        model.codes.data += 1
    assert model.codes.tolist() == [0, 1, 2]
    af.save(step, state, tmp_path)
    af.load(step, state, tmp_path)


def test_parameters_of_half_precision_have_a_mean_of_single_precision():
    """A thousandth of a difference is below the last of eight bits."""
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    torch.nn.init.ones_(model.weight)

    def loss_fn(model, batch):
        return -model.weight.sum().float()

    plan = af.ema(0.999)(af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=1.0)))
    state, step = af.build(plan, af.DistState())
    mean = 2.0
    for number in range(1, 20):
        state, _ = step(state, BATCH)
        mean += 0.001 * (1.0 + number - mean)
    held = step.plan.after_update[0].state_dict()["mean/weight"]
    assert held.dtype == torch.float32
    assert held.item() == pytest.approx(mean, rel=1e-5)
    with af.averaged(step):
        assert model.weight.item() == held.bfloat16().item()
    assert model.weight.item() == 20.0


@each_rule
def test_a_resumed_run_resumes_with_its_average(tmp_path, recipe, theirs):
    batches = [(torch.randn(6, 3).double(), torch.randn(6, 1).double()) for _ in range(6)]

    def run(state, start, stop, load):
        state, step = make(af.compose(af.wrap_ddp(), recipe, af.skip_nonfinite()), state)
        state = af.load(step, state, tmp_path) if load else state
        for batch in batches[start:stop]:
            state, _ = step(
                state, tuple(each.tensor_split(state.world_size)[state.rank] for each in batch)
            )
        af.save(step, state, tmp_path)
        return means(step)

    simulate(lambda state: run(state, 0, 3, load=False), world_size=1)
    found = simulate(lambda state: run(state, 3, 6, load=True), world_size=3)
    for each in found:
        ours.assert_close(each, by_hand(batches, theirs))


def test_a_step_within_is_refused():
    state, step = make(af.ema(0.5))
    with (
        af.averaged(step),
        pytest.raises(ValueError, match="must not be stepped within averaged"),
    ):
        step(state, BATCH)


@pytest.mark.parametrize("wait", [True, False])
def test_saving_the_run_within_is_refused_on_all_ranks(tmp_path, wait):
    """The error comes on all ranks even if only one rank is inside."""

    def run(state):
        state, step = make(af.compose(af.wrap_ddp(), af.ema(0.5)), state)
        with (
            af.averaged(step) if state.rank else nullcontext(),
            pytest.raises(af.AccelError) as told,
        ):
            af.save(step, state, tmp_path, wait=wait)
        return str(told.value)

    first, second = simulate(run, world_size=2)
    assert first.startswith("save: ")
    assert second == (
        "save: step must have its own parameters, got those of averaged(step); call it before or after"
    )
    assert not list(tmp_path.iterdir())


LOADS = {
    "load": lambda folder, state, step: af.load(step, state, folder),
    "load_accelerate": lambda folder, state, step: af.checkpoint.load_accelerate(
        step, state, folder
    ),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_loading_a_run_within_is_refused_before_anything_is_read(tmp_path, load):
    state, step = make(af.ema(0.5))
    with (
        af.averaged(step),
        pytest.raises(ValueError, match="load: step must have its own parameters, got those of"),
    ):
        load(tmp_path, state, step)


def test_showing_it_twice_is_refused():
    _, step = make(af.ema(0.5))
    with (
        af.averaged(step),
        pytest.raises(ValueError, match="got it twice"),
        af.averaged(step),
    ):
        pass


@pytest.mark.parametrize("recipe", [af.compose(), af.compose(af.ema(0.5), af.ema(0.9))])
def test_there_must_be_one(recipe):
    _, step = make(recipe)
    with (
        pytest.raises(ValueError, match="averaged: step must have one average in its plan, got"),
        af.averaged(step),
    ):
        pass


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: af.ema(1.0), "ema: decay must be < 1, got 1.0"),
        (lambda: af.ema(0.0), "ema: decay must be a finite number > 0, got 0.0"),
        (lambda: af.ema(float("nan")), "decay must be a finite number > 0, got nan"),
        (lambda: af.ema(0.9, num_warmup=-1), "num_warmup must be an integer >= 0, got -1"),
        (lambda: af.swa(num_warmup=0.5), "num_warmup must be an integer >= 0"),
    ],
)
def test_what_makes_no_average_is_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize(
    ("decay", "error", "text"),
    [
        (
            lambda n: 1.5,
            ValueError,
            r"decay must return a number in \[0, 1\] for 1 updates, got 1.5",
        ),
        (lambda n: float("nan"), ValueError, r"decay must return a number in \[0, 1\] .* got nan"),
        (lambda n: None, TypeError, "decay must return a number, got None"),
    ],
)
def test_a_decay_that_is_none_is_refused_on_all_ranks(decay, error, text):
    def run(state):
        state, step = make(af.compose(af.wrap_ddp(), af.ema(decay)), state)
        state, _ = step(state, BATCH)
        with pytest.raises(error, match=f"^ema: {text}"):
            step(state, BATCH)

    simulate(run, world_size=2)
