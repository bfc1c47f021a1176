"""profile: a trace and a table of a few steps, which compute the same bits and leave nothing behind."""

import gc
import gzip
import json
import re
from dataclasses import replace

import pytest
import torch
from torch.profiler import profile as torch_profile

import accel_fn as af
from accel_fn.observe.phase_times import phase_times
from accel_fn.testing import simulate
from tests.support import strategies as ours

STEPS = range(3, 5)
PHASES = ["data", "forward", "backward", "collectives", "update", "checks", "rest", "step"]


def batch(number, state=None):
    state = state or af.DistState()
    generator = torch.Generator().manual_seed(number * state.world_size + state.rank)
    return tuple(torch.randn(4, width, generator=generator).double() for width in (3, 1))


def recipe(folder, *transforms, steps=STEPS):
    return af.compose(*transforms, af.profile(folder, steps=steps))


def run(state, step, num_steps):
    """Make steps; return the losses."""
    losses = []
    for number in range(num_steps):
        state, report = step(state, batch(number, state))
        losses.append(float(report.loss))
    return state, losses


def forget(built):
    """Let go of a step, as the end of a program does."""
    built.clear()
    gc.collect()


def events(folder):
    """Return our ranges in a trace, in order."""
    with gzip.open(folder / "rank0.json.gz") as file:
        every = json.load(file)["traceEvents"]
    found = [each for each in every if each.get("name", "").startswith("accel_fn.")]
    return sorted(found, key=lambda each: each["ts"])


def ranges(folder):
    """Return the names of our ranges in a trace, in order."""
    return [each["name"].removeprefix("accel_fn.") for each in events(folder)]


def test_a_trace_names_the_phases_of_its_steps_and_the_table_is_printed_and_written(
    tmp_path, capsys
):
    state, step = ours.built(recipe(tmp_path, af.accumulate(2)))
    run(state, step, 6)
    of_a_step = ["checks", *["forward", "backward"] * 2, "update", "update", "checks"]
    assert ranges(tmp_path) == ["data", "step 3", *of_a_step, "data", "step 4", *of_a_step]
    printed = capsys.readouterr().out
    assert (tmp_path / "phases.txt").read_text() == printed
    heading, columns, row = printed.splitlines()
    assert heading == "profile of steps 3 to 4, milliseconds a step"
    assert columns.split() == PHASES
    name, times = row[:9], [*map(float, row[9:].split())]
    assert name.strip() == "rank 0"
    assert sum(times[:-1]) == pytest.approx(times[-1], abs=0.5)  # each is rounded
    assert times[PHASES.index("forward")] > 0


@pytest.mark.parametrize("transforms", [(), (af.accumulate(2), af.clip(0.1), af.ema(0.9))])
def test_profiled_steps_compute_the_same_bits(tmp_path, transforms):
    found = {}
    for each in (af.compose(*transforms), recipe(tmp_path, *transforms)):
        state, step = ours.built(each)
        _, losses = run(state, step, 6)
        found[each] = losses, step.plan.model.state_dict()
    (losses, expected), (profiled, actual) = found.values()
    assert profiled == losses
    ours.assert_identical(actual, expected)


def test_simulated_ranks_train_alike_and_one_of_them_is_profiled(tmp_path, capsys):
    def train(state, transform):
        state, step = ours.built(transform, state)
        _, losses = run(state, step, 6)
        return losses, step.plan.model.state_dict()

    plain = simulate(lambda state: train(state, af.wrap_ddp()), world_size=2)
    profiled = simulate(lambda state: train(state, recipe(tmp_path, af.wrap_ddp())), world_size=2)
    for (losses, expected), (found, actual) in zip(plain, profiled, strict=True):
        assert found == losses
        ours.assert_identical(actual, expected)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["phases.txt", "rank0.json.gz"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("rank 0 ")


def test_a_run_that_resumes_in_the_middle_profiles_what_is_left(tmp_path, capsys):
    state, step = ours.built(recipe(tmp_path, steps=range(3, 7)))
    run(replace(state, step=4), step, 3)
    assert [each for each in ranges(tmp_path) if each.startswith("step")] == ["step 5", "step 6"]
    assert capsys.readouterr().out.startswith("profile of steps 5 to 6,")


def test_a_run_behind_the_steps_warns_once(tmp_path):
    state, step = ours.built(recipe(tmp_path))
    text = "profile: steps should lie ahead, got range(3, 5) at step 7; nothing is profiled"
    with pytest.warns(UserWarning, match=re.escape(text)) as caught:
        run(replace(state, step=7), step, 3)
    assert len(caught) == 1
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("num_steps", "ending"),
    [(1, "step 1; no trace is written"), (3, "step 3; the trace so far is in {}")],
)
def test_a_run_that_ends_early_warns_and_writes_the_trace_so_far(tmp_path, num_steps, ending):
    built = [*ours.built(recipe(tmp_path))]
    run(*built, num_steps)
    text = f"profile: run should make steps 3 to 4, it ended in or after {ending.format(tmp_path)}"
    with pytest.warns(UserWarning, match=re.escape(text)) as caught:
        forget(built)
    assert len(caught) == 1
    assert (tmp_path / "rank0.json.gz").exists() == (num_steps == 3)
    assert not torch.autograd._profiler_enabled()
    if num_steps == 3:
        assert ranges(tmp_path)[:3] == ["data", "step 3", "checks"]


def failing(number):
    """Make a loss that raises in its call of this number."""
    calls = []

    def loss_fn(model, given):
        calls.append(given)
        if len(calls) == number:
            raise OSError("no more")
        return ours.mse(model, given)

    return loss_fn


def test_an_exception_in_a_profiled_step_leaves_a_trace(tmp_path):
    built = [*ours.built(recipe(tmp_path), loss_fn=failing(4))]
    with pytest.raises(OSError, match="no more"):
        run(*built, 6)
    with pytest.warns(UserWarning, match=r"it ended in or after step 4; the trace so far is in"):
        forget(built)
    assert "step 4" in ranges(tmp_path)


def test_a_run_that_catches_the_exception_of_a_step_goes_on_profiling(tmp_path, capsys):
    state, step = ours.built(recipe(tmp_path), loss_fn=failing(3))
    state, _ = run(state, step, 2)
    with pytest.raises(OSError, match="no more"):
        run(state, step, 1)
    run(state, step, 2)
    assert capsys.readouterr().out.startswith("profile of steps 3 to 4,")
    assert ranges(tmp_path)[-3:] == ["update", "update", "checks"]


@pytest.mark.parametrize("steps", [range(3), range(5, 5), range(1, 9, 2), range(5, 1, -1)])
def test_steps_that_are_not_in_a_row_are_refused(steps):
    text = f"profile: steps must be a range of steps in a row, the first >= 1, got {steps}"
    with pytest.raises(ValueError, match=re.escape(text)):
        af.profile("traces", steps=steps)


@pytest.mark.parametrize("steps", [10, [10, 11], None, slice(1, 3)])
def test_steps_of_another_type_are_refused(steps):
    text = f"profile: steps must be a range of steps in a row, got {steps}; use range(11, 14)"
    with pytest.raises(TypeError, match=re.escape(text)):
        af.profile("traces", steps=steps)


def test_a_folder_that_cannot_be_written_to_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "traces"
    text = f"folder must be one that every rank can write to, got '{folder}'; the error is Not a directory"
    caught = []

    def build(state):
        with pytest.raises(ValueError, match=re.escape(text)):
            ours.built(recipe(folder, af.wrap_ddp()), state)
        caught.append(state.rank)

    simulate(build, world_size=2)
    assert sorted(caught) == [0, 1]


def test_a_second_profiler_is_refused(tmp_path):
    built = [*ours.built(recipe(tmp_path))]
    text = "profile: torch's profiler must be free, got one that runs already; profile one plan at a time"
    with torch_profile(), pytest.raises(ValueError, match=re.escape(text)):
        run(*built, 4)
    with pytest.warns(UserWarning, match="it ended in or after step 2; no trace is written"):
        forget(built)


def test_a_step_in_two_calls_is_one_step_of_the_profile(tmp_path):
    state, step = ours.built(recipe(tmp_path))
    for number in range(5):
        state, grads, report = step.grads(state, batch(number))
        state, _ = step.update(state, grads, report)
    of_a_step = ["checks", "forward", "backward", "checks", "update", "update", "checks"]
    assert ranges(tmp_path) == ["data", "step 3", *of_a_step, "data", "step 4", *of_a_step]


def test_a_profile_ends_where_the_run_leaves_its_steps(tmp_path, capsys):
    state, step = ours.built(recipe(tmp_path))
    state, _ = run(state, step, 3)
    run(replace(state, step=20), step, 1)
    assert capsys.readouterr().out.startswith("profile of steps 3 to 3,")


def test_an_evaluation_between_steps_is_a_part_of_the_data(tmp_path):
    state, step = ours.built(recipe(tmp_path))
    for number in range(5):
        state, _ = step(state, batch(number))
        af.evaluate(step, state, [batch(number)])
    assert ranges(tmp_path).count("forward") == 2


def test_it_prints_as_its_call():
    plan = af.profile("runs/a/profile")(ours.plan())
    assert "observers=[profile('runs/a/profile')]" in repr(plan)


@pytest.mark.parametrize("saved_with", [False, True])
def test_a_profile_may_be_added_to_a_run_or_left_out(tmp_path, saved_with):
    with_profile = recipe(tmp_path / "profile", af.ema(0.9), steps=range(1, 2))
    without = af.ema(0.9)
    first, second = (with_profile, without) if saved_with else (without, with_profile)
    state, step = ours.built(first)
    state, _ = run(state, step, 1)
    af.save(step, state, tmp_path / "run")
    state, step = ours.built(second)
    state = af.load(step, state, tmp_path / "run")
    assert state.step == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, for its traces")
def test_a_table_has_the_time_of_the_device(tmp_path, capsys):
    """What the backward launches on a thread of its own counts as backward."""
    state, step = ours.built(recipe(tmp_path, af.place()), af.init())
    run(state, step, 6)
    *_, title, row = capsys.readouterr().out.splitlines()
    assert title == "of which the device is at work, by the phase that launched it"
    assert len(row[9:].split()) == len(PHASES)
    with gzip.open(tmp_path / "rank0.json.gz") as file:
        device = phase_times(json.load(file)).device
    assert device["forward"] > 0
    assert device["backward"] > 0
    assert device["update"] > 0
