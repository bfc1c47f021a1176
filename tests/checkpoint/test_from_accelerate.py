"""load_accelerate: runs that accelerate saved go on as they would have there."""

from __future__ import annotations

import json
import pickle
import shutil

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.comm.dtensor import whole
from accel_fn.errors import CheckpointError
from accel_fn.testing import simulate
from tests.processes import launch

NUM_BEFORE, NUM_AFTER = 3, 4


def make(optimizer="AdamW", width=4, seed=0):
    """Model and optimizer of both sides."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1)).double()
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
from tests.checkpoint.test_from_accelerate import NUM_BEFORE, batches, loss_fn, make

def train(name):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model, optimizer = make(name)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for number, batch in enumerate(batches()):
        if number == NUM_BEFORE:
            accelerator.save_state({folder!r} + "/" + name)
        accelerator.backward(loss_fn(model, batch))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    state = accelerator.unwrap_model(model).state_dict()
    return {{key: value.tolist() for key, value in state.items()}}

with open({folder!r} + "/ends.json", "w") as file:
    json.dump({{name: train(name) for name in ("AdamW", "SGD")}}, file)
say("done")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder for each optimizer, as accelerate's own code wrote it, and where its runs ended."""
    folder = tmp_path_factory.mktemp("accelerate")
    launch(SCRIPT.format(folder=str(folder)), num_processes=1, expect=["done"])
    return folder, json.loads((folder / "ends.json").read_text())


def built(state=None, recipe=None, **options):
    model, optimizer = make(seed=5, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    plan = af.Plan(loss_fn, model, optimizer)
    recipe = recipe or af.compose()
    return *af.build(state or af.DistState(), recipe(plan)), schedule


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_run_ends_where_it_would_have_ended_there(saved, name):
    folder, ends = saved
    state, step, schedule = built(optimizer=name)
    state = af.load_accelerate(folder / name, step, state, schedulers=[schedule])
    assert state.step == (NUM_BEFORE if name == "AdamW" else 0)  # SGD does not count
    for batch in batches()[NUM_BEFORE:]:
        state, _ = step(state, batch)
        schedule.step()
    for key, value in step.plan.model.state_dict().items():
        expected = torch.tensor(ends[name][key], dtype=value.dtype)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_two_ranks_go_on_from_one(saved):
    """Batches are cut in half; BatchNorm alone would see that."""
    folder, _ = saved

    def run(state):
        state, step, _ = built(state, af.wrap_ddp())
        step.plan.model.eval()
        state = af.load_accelerate(folder / "AdamW", step, state)
        for batch in batches()[NUM_BEFORE:]:
            state, _ = step(state, batch[state.rank :: state.world_size])
        return [each.detach().clone() for each in step.plan.model.parameters()]

    (one,), (two, other) = simulate(run, world_size=1), simulate(run, world_size=2)
    torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(two, other, rtol=0, atol=0)


def test_the_scale_of_float16_goes_on(saved, tmp_path):
    """As accelerate writes it: the state_dict of torch's own scaler."""
    shutil.copytree(saved[0] / "AdamW", tmp_path / "fp16")
    scaler = torch.amp.GradScaler(device="cpu", init_scale=512.0, growth_interval=7)
    torch.save(scaler.state_dict() | {"_growth_tracker": 5}, tmp_path / "fp16" / "scaler.pt")
    model, optimizer = make()
    plan = af.with_amp("fp16")(af.Plan(loss_fn, model, optimizer))
    state, step = af.build(af.DistState(), plan)
    state = af.load_accelerate(tmp_path / "fp16", step, state)
    assert (float(state.scaler.scale), int(state.scaler.good_steps)) == (512.0, 5)
    assert (state.scaler.growth_interval, int(state.scaler.skipped)) == (7, 0)


def test_how_updates_are_computed_stays_that_of_the_program(saved):
    """accelerate's run was not fused; one that is stays so."""
    model, _ = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3, fused=True)
    state, step = af.build(af.DistState(), af.Plan(loss_fn, model, optimizer))
    state = af.load_accelerate(saved[0] / "AdamW", step, state)
    (group,) = optimizer.param_groups
    assert (group["fused"], group["lr"]) == (True, 0.05)
    step(state, batches()[0])


def test_what_is_left_out_is_logged(saved, caplog):
    state, step, _ = built()
    af.load_accelerate(saved[0] / "AdamW", step, state)
    assert caplog.messages == [
        "load_accelerate: random_states_0.pkl is left out",
        "load_accelerate: scheduler.bin is left out",
        "load_accelerate: give schedulers=[...] to have them filled",
    ]


def test_what_accelerate_kept_for_others_is_named(saved, tmp_path, caplog):
    """Of many files, some."""
    shutil.copytree(saved[0] / "AdamW", tmp_path / "copy")
    (tmp_path / "copy" / "custom_checkpoint_0.pkl").touch()
    for rank in range(1, 15):
        (tmp_path / "copy" / f"random_states_{rank}.pkl").touch()
    state, step, schedule = built()
    af.load_accelerate(tmp_path / "copy", step, state, schedulers=[schedule])
    assert caplog.messages[0] == "load_accelerate: custom_checkpoint_0.pkl is left out"
    assert caplog.messages[-1] == "load_accelerate: so are 4 more files"
    assert len(caplog.messages) == 13


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weights_in_several_files_fill_a_model_in_shards(saved, tmp_path, world_size):
    """The optimizer as well; some ranks hold nothing of some parameters."""
    shutil.copytree(saved[0] / "AdamW", tmp_path / "copy")
    model, _ = make()
    af.load_model(model, tmp_path / "copy")
    af.save_model(model, tmp_path / "copy", max_shard_size=64)
    assert not (tmp_path / "copy" / "model.safetensors").exists()

    def run(state, recipe, folder):
        state, step, _ = built(state, recipe)
        step.plan.model.eval()
        state = af.load_accelerate(folder, step, state)
        for batch in batches()[NUM_BEFORE:]:
            state, _ = step(state, batch[state.rank :: state.world_size])
        return [whole(each).clone() for each in step.plan.model.parameters()]

    (one,) = simulate(lambda state: run(state, af.compose(), saved[0] / "AdamW"), world_size=1)
    for each in simulate(
        lambda state: run(state, af.wrap_fsdp(), tmp_path / "copy"), world_size=world_size
    ):
        torch.testing.assert_close(each, one, rtol=1e-12, atol=1e-12)


# What does not fit changes nothing.


def refused(folder, words, error=CheckpointError, schedulers=(), **options):
    state, step, _ = built(**options)
    before = {key: value.clone() for key, value in step.plan.model.state_dict().items()}
    with pytest.raises(error, match=words):
        af.load_accelerate(folder, step, state, schedulers=schedulers)
    torch.testing.assert_close(dict(step.plan.model.state_dict()), before, rtol=0, atol=0)
    assert not step.plan.optimizer.state


def test_another_optimizer_is_refused(saved):
    refused(
        saved[0] / "AdamW",
        r"options of group 0: .*'betas'.* saved, .*'momentum'.* here",
        optimizer="SGD",
    )


def test_another_model_is_refused(saved):
    refused(saved[0] / "AdamW", r"exp_avg of parameter 0: \[4, 3\] saved, \[5, 3\] here", width=5)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
def test_a_missing_file_is_named(saved, tmp_path, name):
    shutil.copytree(saved[0] / "AdamW", tmp_path / "copy")
    (tmp_path / "copy" / name).unlink()
    refused(tmp_path / "copy", f"save_state wrote, got .* without {name}")


def test_several_models_are_refused(saved, tmp_path):
    shutil.copytree(saved[0] / "AdamW", tmp_path / "copy")
    (tmp_path / "copy" / "model_1.safetensors").touch()
    refused(tmp_path / "copy", "must be of one model and one optimizer, got model_1.safetensors")


@pytest.mark.parametrize("name", ["optimizer.bin", "scheduler.bin", "scaler.pt"])
def test_a_pickle_runs_nothing(saved, tmp_path, name):
    class Bomb:
        def __reduce__(self):
            return (tmp_path / "fuse").touch, ()

    shutil.copytree(saved[0] / "AdamW", tmp_path / "copy")
    (tmp_path / "copy" / name).write_bytes(pickle.dumps(Bomb()))
    schedulers = [torch.optim.lr_scheduler.StepLR(make()[1], 2, 0.5)]
    refused(tmp_path / "copy", f"{name} must hold tensors and plain data", schedulers=schedulers)
    assert not (tmp_path / "fuse").exists()


@pytest.mark.parametrize("content", [[1, 2], {"state": {}}, {"state": {}, "param_groups": [{}]}])
def test_a_file_that_is_no_optimizer_s_is_refused(saved, tmp_path, content):
    shutil.copytree(saved[0] / "AdamW", tmp_path / "copy")
    torch.save(content, tmp_path / "copy" / "optimizer.bin")
    refused(tmp_path / "copy", "optimizer.bin must hold an optimizer's state_dict, got something")


def test_the_scale_of_a_scaler_that_was_off_is_that_of_the_program(saved, tmp_path):
    shutil.copytree(saved[0] / "AdamW", tmp_path / "copy")
    torch.save(torch.amp.GradScaler(enabled=False).state_dict(), tmp_path / "copy" / "scaler.pt")
    model, optimizer = make()
    plan = af.with_amp("fp16", init_scale=256.0)(af.Plan(loss_fn, model, optimizer))
    state, step = af.build(af.DistState(), plan)
    state = af.load_accelerate(tmp_path / "copy", step, state)
    assert float(state.scaler.scale) == 256.0


@pytest.mark.parametrize("content", [[1], {"scale": 2.0}, {"scale": "much", "_growth_tracker": 1}])
def test_a_file_that_is_no_scaler_s_is_refused(saved, tmp_path, content):
    shutil.copytree(saved[0] / "AdamW", tmp_path / "copy")
    torch.save(content, tmp_path / "copy" / "scaler.pt")
    refused(
        tmp_path / "copy",
        "scaler.pt must hold a scaler's state_dict, got something else",
        recipe=af.with_amp("fp16"),
    )


@pytest.mark.parametrize("count", [torch.ones(2), "many", None])
def test_a_count_that_is_none_is_refused(saved, tmp_path, count):
    shutil.copytree(saved[0] / "AdamW", tmp_path / "copy")
    path = tmp_path / "copy" / "optimizer.bin"
    content = torch.load(path)
    content["state"][0]["step"] = count
    torch.save(content, path)
    refused(tmp_path / "copy", "optimizer.bin must hold an optimizer's state_dict, got something")


def test_what_is_no_step_or_folder_is_refused(saved):
    state, step, _ = built()
    with pytest.raises(TypeError, match="load_accelerate: step must be a Step, got "):
        af.load_accelerate(saved[0] / "AdamW", {"a": step}, state)
    with pytest.raises(TypeError, match="load_accelerate: folder must be the path of a folder"):
        af.load_accelerate(3, step, state)


def test_a_scheduler_that_is_none_is_refused(saved):
    refused(saved[0] / "AdamW", "schedulers must have load_state_dict", TypeError, schedulers=[3])


@pytest.mark.parametrize("schedulers", [None, 3, "one"])
def test_what_is_no_list_of_schedulers_is_refused(saved, schedulers):
    words = "load_accelerate: schedulers must be a list of schedulers, got "
    if schedulers == "one":
        schedulers = built()[2]
    refused(saved[0] / "AdamW", words, TypeError, schedulers=schedulers)


def test_arguments_in_another_order_are_told(saved):
    state, step, _ = built()
    with pytest.raises(TypeError, match="load_accelerate: state must be a DistState, got 'Step'"):
        af.load_accelerate(saved[0] / "AdamW", state, step)


def without_count(content):
    del content["last_epoch"]
    return content


@pytest.mark.parametrize(
    "change", [without_count, lambda content: [1], lambda content: content | {"T_max": 3}]
)
def test_a_file_that_is_not_of_the_scheduler_is_refused(saved, tmp_path, change):
    shutil.copytree(saved[0] / "AdamW", tmp_path / "copy")
    path = tmp_path / "copy" / "scheduler.bin"
    torch.save(change(torch.load(path)), path)
    schedule = torch.optim.lr_scheduler.StepLR(make()[1], 2, 0.5)
    words = "scheduler.bin must hold the state_dict of a StepLR, got "
    refused(tmp_path / "copy", words, schedulers=[schedule])
