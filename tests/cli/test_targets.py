"""`explain`, `estimate` and `test` take one kind of target."""

import json

import pytest

from tests.cli.commands import command

SCRIPT = """
import torch, torch.nn.functional as F
from torch import nn
import accel_fn as af

def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])

def make_model():
    return nn.Linear(3, 1)

def make_batch():
    return torch.randn(5, 3), torch.randn(5, 1)

def make_both():
    return make_model(), make_batch()

def make_plan():
    model = make_model()
    return af.accumulate(2)(af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1)))

def make_plan_and_state():
    return make_plan(), af.init()

def make_uneven():
    # Divided by the samples of the rank, not of the batch.
    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum") / 3
    model = make_model()
    return af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))

def make_half():
    return nn.Linear(3, 1).half(), make_batch()

def make_pair():
    return 1, 2
"""
KINDS = ["make_model", "make_both", "make_plan", "make_plan_and_state"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize("name", KINDS)
def test_each_command_takes_each_kind(folder, name):
    explained = command(folder, "explain", f"train.py:{name}", "--json").stdout
    optimizer = "SGD(lr=0.1)" if "plan" in name else "AdamW(lr=0.001)"
    assert optimizer in explained
    batch = ["--batch", "train.py:make_batch"]
    estimated = command(folder, "estimate", f"train.py:{name}", "--json", *batch)
    [found] = json.loads(estimated.stdout)
    assert found["parameters"] == 16
    # AdamW holds two tensors a parameter and a count; SGD holds nothing.
    assert found["optimizer"] == (0 if "plan" in name else 40)
    assert found["batch"] == 80
    tested = command(folder, "test", f"train.py:{name}", "-n", "3", *batch)
    assert tested.stdout == f"holds: 3 ranks train train.py:{name} as one does\n"
    assert tested.exit_code == 0


def test_a_plan_that_ranks_change_is_found(folder):
    target = "train.py:make_uneven"
    done = command(folder, "test", target, "--batch", "train.py:make_batch")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_plan_is_tested_on_a_batch(folder):
    done = command(folder, "test", "train.py:make_plan")
    assert done.exit_code == 2
    assert "a plan is checked on a batch: give --batch FILE.py:NAME" in done.stderr


@pytest.mark.parametrize("name", ["explain", "estimate", "test"])
def test_another_kind_is_refused_in_one_line(folder, name):
    done = command(folder, name, "train.py:make_pair")
    assert done.stderr == (
        f"Error: {name}: target must name a function that gives a plan, a plan and a state, a model, or "
        "a model and a batch, got 'train.py:make_pair (int, int)'\n"
    )


def test_the_estimate_of_a_model_that_casts_itself_ends_in_one_line(folder):
    done = command(folder, "estimate", "train.py:make_half")
    assert done.stderr == (
        "Error: estimate_memory: make_model must make the model in its dtype, and not cast it, got "
        '"_apply(): Couldn\'t swap Linear.weight"; leave .half() or .to(dtype) out and call '
        "torch.set_default_dtype(dtype) first\n"
    )
