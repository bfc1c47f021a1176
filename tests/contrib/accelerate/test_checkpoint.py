"""load_accelerate: a run that accelerate saved ends with the parameters that accelerate would
reach."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis.strategies import data as any_data
from hypothesis.strategies import sampled_from
from torch import nn

import accel_fn as af
from accel_fn.errors import CheckpointError
from accel_fn.testing import simulate
from tests.checkpoint.test_forged_checkpoints import (
    ANY,
    GONE,
    OPEN,
    as_text,
    kinds,
    places,
    replaced,
)
from tests.support import strategies as ours
from tests.support.processes import launch

NUM_BEFORE, NUM_AFTER = 3, 4


def make(optimizer="AdamW", width=4, seed=0):
    """Make the model and the optimizer of both runs."""
    torch.manual_seed(seed)
    first = nn.Linear(3, width, bias=False)  # the norm would make the gradient of a bias rounding
    model = nn.Sequential(first, nn.BatchNorm1d(width), nn.Linear(width, 1)).double()
    options = {"AdamW": {"lr": 0.1}, "SGD": {"lr": 0.1, "momentum": 0.9}}[optimizer]
    return model, getattr(torch.optim, optimizer)(model.parameters(), **options)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 3, generator=generator).double() for _ in range(NUM_BEFORE + NUM_AFTER)]


def loss_fn(model, batch):
    return (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()


SCRIPT = """
import json
import torch
from accelerate import Accelerator
from tests.contrib.accelerate.test_checkpoint import train

torch.set_num_threads(1)
ends = {{}}
for name in ("AdamW", "SGD"):
    accelerator = Accelerator(cpu=True)
    save = lambda *parts: accelerator.save_state({folder!r} + "/" + name)
    ends[name] = train(name, accelerator.prepare, accelerator.backward, save)
with open({folder!r} + "/ends.json", "w") as file:
    json.dump(ends, file)
say("done")
"""


def train(name, prepare, backward, save):
    """Train by hand or by accelerate, and save on the way; return the parameters at the end."""
    model, optimizer = make(name)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, schedule = prepare(model, optimizer, schedule)
    for number, batch in enumerate(batches()):
        if number == NUM_BEFORE:
            save(model, optimizer, schedule)
        backward(loss_fn(model, batch))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {key: value.tolist() for key, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder for each optimizer, as accelerate saves it, and the parameters where its run
    ended."""
    home, ends = tmp_path_factory.mktemp("accelerate"), {}
    for name in ("AdamW", "SGD"):
        folder = home / name

        def save(model, optimizer, schedule, folder=folder):
            af.save_model(model, folder)
            torch.save(optimizer.state_dict(), folder / "optimizer.bin")
            torch.save(schedule.state_dict(), folder / "scheduler.bin")
            torch.save({}, folder / "random_states_0.pkl")

        ends[name] = train(name, lambda *parts: parts, torch.Tensor.backward, save)
    return home, ends


@pytest.mark.slow
def test_these_are_the_files_and_the_ends_of_accelerate_itself(saved, tmp_path):
    launch(SCRIPT.format(folder=str(tmp_path)), num_processes=1, expect=["done"])
    assert json.loads((tmp_path / "ends.json").read_text()) == saved[1]
    for name in ("AdamW", "SGD"):
        files, found = saved[0] / name, tmp_path / name
        assert {each.name for each in found.iterdir()} == {each.name for each in files.iterdir()}
        for each in ("optimizer.bin", "scheduler.bin"):
            assert as_text(torch.load(found / each)) == as_text(torch.load(files / each))


@pytest.fixture
def copied(saved, tmp_path):
    """Copy the folder of AdamW, to change it."""
    return Path(shutil.copytree(saved[0] / "AdamW", tmp_path / "copied"))


def built(state=None, recipe=None, **options):
    model, optimizer = make(seed=5, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    plan = af.Plan(loss_fn, model, optimizer)
    recipe = recipe or af.compose()
    return *af.build(recipe(plan), state or af.DistState()), schedule


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_run_ends_where_it_would_have_ended_there(saved, name):
    folder, ends = saved
    state, step, schedule = built(optimizer=name)
    state = af.checkpoint.load_accelerate(step, state, folder / name, schedulers=[schedule])
    assert state.step == (NUM_BEFORE if name == "AdamW" else 0)  # SGD counts no updates
    for batch in batches()[NUM_BEFORE:]:
        state, _ = step(state, batch)
        schedule.step()
    for key, value in step.plan.model.state_dict().items():
        expected = torch.tensor(ends[name][key], dtype=value.dtype)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def trained(state, recipe, folder):
    """Return the parameters at the end of a run; batches are cut, which BatchNorm in training mode
    would show."""
    state, step, _ = built(state, recipe)
    step.plan.model[1].eval()
    state = af.checkpoint.load_accelerate(step, state, folder)
    for batch in batches()[NUM_BEFORE:]:
        state, _ = step(state, batch[state.data.rank :: state.data.world_size])
    parameters = ours.whole(dict(step.plan.model.named_parameters()))
    return [each.clone() for each in parameters.values()]


@pytest.mark.parametrize(
    ("recipe", "world"),
    [
        (af.wrap_ddp, {"world_size": 2}),
        (af.wrap_fsdp, {"mesh": {"dp": 2, "tp": 2}}),
    ],
)
def test_ranks_resume_from_one(saved, recipe, world):
    (one,) = simulate(lambda state: trained(state, af.compose(), saved[0] / "AdamW"), world_size=1)
    for each in simulate(lambda state: trained(state, recipe(), saved[0] / "AdamW"), **world):
        torch.testing.assert_close(each, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_scale_of_float16_is_loaded_if_there_was_one(copied, enabled):
    """accelerate saves the `state_dict` of torch's scaler, which is empty if it was off."""
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=7, enabled=enabled)
    content = scaler.state_dict() | ({"_growth_tracker": 5} if enabled else {})
    torch.save(content, copied / "scaler.pt")
    recipe = af.with_amp("fp16", init_scale=256.0, growth_interval=9)
    state, step, _ = built(recipe=recipe)
    scaler = af.checkpoint.load_accelerate(step, state, copied).scaler
    found = (float(scaler.scale), int(scaler.good_steps), scaler.growth_interval)
    assert found == ((512.0, 5, 7) if enabled else (256.0, 0, 9))
    assert int(scaler.skipped) == 0


def test_how_updates_are_computed_stays_that_of_the_program(saved):
    """accelerate's run was not fused; a fused program stays fused."""
    model, _ = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3, fused=True)
    state, step = af.build(af.Plan(loss_fn, model, optimizer), af.DistState())
    state = af.checkpoint.load_accelerate(step, state, saved[0] / "AdamW")
    (group,) = optimizer.param_groups
    assert (group["fused"], group["lr"]) == (True, 0.05)
    step(state, batches()[0])


def test_what_is_left_out_is_logged(saved, capsys):
    state, step, _ = built()
    af.checkpoint.load_accelerate(step, state, saved[0] / "AdamW")
    assert capsys.readouterr().err.splitlines() == [
        "load_accelerate: left out: random_states_0.pkl, scheduler.bin",
        "load_accelerate: give schedulers=[...] to have them filled",
    ]


def test_weights_in_several_files_fill_a_model_in_shards(saved, copied):
    """The optimizer is loaded too; some ranks hold no element of some parameters."""
    model, _ = make()
    af.load_model(model, copied)
    af.save_model(model, copied, max_shard_size=64)
    assert not (copied / "model.safetensors").exists()
    (one,) = simulate(lambda state: trained(state, af.compose(), saved[0] / "AdamW"), world_size=1)
    for each in simulate(lambda state: trained(state, af.wrap_fsdp(), copied), world_size=3):
        torch.testing.assert_close(each, one, rtol=1e-12, atol=1e-12)


# -- what does not fit changes nothing


def refused(folder, match, error=CheckpointError, schedulers=(), **options):
    state, step, _ = built(**options)
    before = {key: value.clone() for key, value in step.plan.model.state_dict().items()}
    with pytest.raises(error, match=match):
        af.checkpoint.load_accelerate(step, state, folder, schedulers=schedulers)
    torch.testing.assert_close(dict(step.plan.model.state_dict()), before, rtol=0, atol=0)
    assert not step.plan.optimizer.state


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"optimizer": "SGD"}, r"options of group 0: .*'betas'.* saved, .*'momentum'.* here"),
        ({"width": 5}, r"exp_avg of parameter 0: float64 \[4, 3\] saved, float64 \[5, 3\] here"),
    ],
)
def test_another_program_is_refused(saved, options, match):
    refused(saved[0] / "AdamW", match, **options)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
def test_a_missing_file_is_named(copied, name):
    (copied / name).unlink()
    refused(copied, f"save_state wrote, got .* without {name}")


@pytest.mark.parametrize("name", ["model_1.safetensors", "optimizer_1.bin"])
def test_several_models_are_refused(copied, name):
    (copied / name).touch()
    refused(copied, f"must be of one model and as many optimizers as the .*, got {name}")


def one_scheduler():
    return [torch.optim.lr_scheduler.StepLR(make()[1], 2, 0.5)]


@pytest.mark.parametrize("name", ["optimizer.bin", "scheduler.bin", "scaler.pt"])
def test_a_pickle_runs_nothing(copied, tmp_path, name):
    class Bomb:
        def __reduce__(self):
            return (tmp_path / "fuse").touch, ()

    (copied / name).write_bytes(pickle.dumps(Bomb()))
    refused(copied, f"{name} must hold tensors and plain data", schedulers=one_scheduler())
    assert not (tmp_path / "fuse").exists()


def put(value, *place):
    """What puts a value, or what a function makes of the one that is there, into a saved tree."""

    def change(content):
        *path, last = place
        inner = content
        for key in path:
            inner = inner[key]
        inner[last] = value(inner[last]) if callable(value) else value
        return content

    return change


def one(value):
    return lambda content: value


def wrong(name, expected, *changes):
    return [(name, change, expected) for change in changes]


FIRST, GROUP = ("state", 0), ("param_groups", 0)
SCALE = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
SCALE |= {"_growth_tracker": 0}
WRONG = [
    *wrong(
        "optimizer.bin",
        "optimizer.bin must hold an optimizer's state_dict, got something",
        *map(one, ([1, 2], {"state": {}}, {"state": {}, "param_groups": [{}]})),
        *(put(count, *FIRST, "step") for count in (torch.ones(2), "many", None)),
    ),
    *wrong(
        "scheduler.bin",
        "scheduler.bin must hold the state_dict of a StepLR, got ",
        lambda content: {key: content[key] for key in content if key != "last_epoch"},
        one([1]),
        put(3, "T_max"),
    ),
    *wrong(
        "scaler.pt",
        "scaler.pt must hold a scaler's state_dict, got something else",
        *map(one, ([1], {"scale": 2.0}, {"scale": "much", "_growth_tracker": 1})),
    ),
    *wrong(
        "optimizer.bin",
        r"step of parameter 0: (-3.0|1.5|10+) saved, a count here",
        *(put(count, *FIRST, "step") for count in (torch.tensor(-3.0), 1.5, 10**400)),
    ),
    *wrong(
        "optimizer.bin",
        r"exp_avg(_sq)? of parameter 0: (int64|float16) \[4, 3\] saved, float64 \[4, 3\] here",
        put(torch.Tensor.long, *FIRST, "exp_avg"),
        put(torch.Tensor.half, *FIRST, "exp_avg_sq"),
    ),
    *wrong(
        "optimizer.bin",
        "exp_avg(_sq)? of parameter 0: numbers that no optimizer writes",
        put(torch.Tensor.neg, *FIRST, "exp_avg_sq"),
        put(lambda value: value / 0, *FIRST, "exp_avg"),
    ),
    *wrong("optimizer.bin", "group 0/lr: -0.1 saved, 0.1 here", put(-0.1, *GROUP, "lr")),
    *wrong("optimizer.bin", "group 0/eps: nan saved, 1e-08 here", put(math.nan, *GROUP, "eps")),
    *wrong(
        "optimizer.bin",
        "numbers of parameters: .* saved",
        put(lambda numbers: [0, *numbers[:-1]], *GROUP, "params"),
        put({}, "state", 99),
    ),
    *wrong("scheduler.bin", "last_epoch -5, which is no count", put(-5, "last_epoch")),
    *wrong("scheduler.bin", "_step_count 0.5, which is no", put(0.5, "_step_count")),
    *wrong(
        "scaler.pt",
        "scaler.pt must hold positive factors and counts, got",
        *(one(SCALE | odd) for odd in ({"scale": -8.0}, {"growth_factor": math.nan})),
        one(SCALE | {"_growth_tracker": -1}),
    ),
]


@pytest.mark.parametrize(("name", "change", "expected"), WRONG)
def test_a_file_with_values_that_no_run_has_saved_is_refused(copied, name, change, expected):
    path = copied / name
    torch.save(change(torch.load(path) if path.exists() else None), path)
    options = {"recipe": af.with_amp("fp16")} if name == "scaler.pt" else {}
    refused(copied, expected, schedulers=one_scheduler(), **options)


@pytest.mark.parametrize("name", ["optimizer.bin", "model.safetensors"])
def test_a_link_out_of_the_folder_is_refused(copied, tmp_path, name):
    target = tmp_path / "elsewhere"
    if (copied / name).exists():
        (copied / name).rename(target)
    (copied / name).symlink_to(target)
    words = f"folder must hold its files itself, got .*{name}, which is a link to {target}; copy the file"
    refused(copied, words, schedulers=one_scheduler())


def load_forged(saved, place, value, name="optimizer.bin"):
    """Load an AdamW with one value replaced; return the error if it was refused and changed
    nothing."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(shutil.copytree(saved[0] / "AdamW", Path(home) / "forged"))
        torch.save(replaced(torch.load(folder / name), place, value), folder / name)
        state, step, schedule = built()
        state, _ = step(state, batches()[0])
        parts = [step.plan.model, step.plan.optimizer, schedule]
        before = as_text([each.state_dict() for each in parts])
        try:
            af.checkpoint.load_accelerate(step, state, folder, schedulers=[schedule])
        except CheckpointError as error:
            assert as_text([each.state_dict() for each in parts]) == before
            return error


@ours.share(0.5)
@hypothesis.given(data=any_data())
def test_a_replaced_value_is_refused_and_changes_nothing_or_is_loaded(saved, data):
    name = data.draw(sampled_from(["optimizer.bin", "scheduler.bin"]))
    place = data.draw(sampled_from([*places(torch.load(saved[0] / "AdamW" / name))]))
    load_forged(saved, place, data.draw(sampled_from([*ANY, GONE])), name)


@ours.share(0.5)
@hypothesis.given(data=any_data())
def test_state_of_another_type_or_size_is_refused(saved, data):
    content = torch.load(saved[0] / "AdamW" / "optimizer.bin")
    ways = [
        way
        for way in places(content)
        if len(way) > 2 and not {*OPEN, "maximize", "params"} & {*way}
    ]
    value, place = content, data.draw(sampled_from(ways))
    for key in place:
        value = value[key]
    assert load_forged(saved, place, data.draw(sampled_from(kinds(value))))


def test_weights_that_do_not_fit_leave_the_optimizer_as_it_was(copied):
    af.save_model(make(width=5)[0], copied)
    refused(copied, "load_model: model must be the one saved", ValueError)


@pytest.mark.timeout(60)
def test_a_pipe_is_not_waited_for(copied):
    (copied / "optimizer.bin").unlink()
    os.mkfifo(copied / "optimizer.bin")
    refused(copied, "optimizer.bin must be a regular file")


@pytest.mark.parametrize("schedulers", [[3], None, 3, one_scheduler()[0]], ids="abcd")
def test_what_is_no_list_of_schedulers_is_refused(saved, schedulers):
    match = "load_accelerate: schedulers must be a list of schedulers with load_state_dict"
    refused(saved[0] / "AdamW", match, TypeError, schedulers=schedulers)


def test_other_arguments_are_checked(saved):
    state, step, _ = built()
    folder = saved[0] / "AdamW"
    for given, match in (
        (({"a": step}, state, folder), "step must be a Step, got "),
        ((step, state, 3), "folder must be the path of a folder"),
        ((folder, step, state), "state must be a DistState, got 'Step'"),
    ):
        with pytest.raises(TypeError, match=f"load_accelerate: {match}"):
            af.checkpoint.load_accelerate(*given)
