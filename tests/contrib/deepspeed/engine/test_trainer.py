"""The Trainer of transformers over wrap_deepspeed on two processes, with the real library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accel_fn.contrib.transformers import Trainer
from tests.contrib.deepspeed.engine import trainer
from tests.contrib.transformers import tiny

ROOT = Path(__file__).parents[4]
ROUNDING = 1e-6
"""Of float32, over ten updates: sums in another order."""
STAGES = range(4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what one process has written, and two processes with each stage."""
    folder = tmp_path_factory.mktemp("trainer")
    trainer.work(folder / "one")
    launch = ("-m", "accel_fn", "launch", "-n", "2", "--cpu")
    command = [sys.executable, *launch, trainer.__file__, str(folder)]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def log(folder, name):
    return torch.load(folder / name / "log.pt")


@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_log_what_one_does(folder, stage):
    pairs = zip(log(folder, f"stage {stage}"), log(folder, "one"), strict=True)
    assert all(ours == pytest.approx(alone, abs=ROUNDING) for ours, alone in pairs)


@pytest.mark.parametrize("stage", STAGES)
def test_the_best_weights_are_loaded_and_saved_whole(folder, stage):
    ours, alone, best = (
        load_file(folder / name / "model.safetensors")
        for name in (
            f"stage {stage}/whole",
            "one/whole",
            f"stage {stage}/checkpoint-{trainer.BEGUN}",
        )
    )
    assert ours.keys() == alone.keys()
    for name, weight in alone.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=ROUNDING)
        assert torch.equal(ours[name], best[name])


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_training_logs_the_bits_of_one_that_never_stopped(folder, stage):
    assert log(folder, f"resumed {stage}") == log(folder, f"stage {stage}")


def test_the_argument_of_transformers_names_the_recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")  # which transformers sets to true
    with pytest.raises(ValueError, match="deepspeed") as found:
        tiny.trainer(Trainer, tmp_path, deepspeed={"zero_optimization": {"stage": 2}})
    assert str(found.value).startswith("Trainer: args.deepspeed must not be set, got ")
    assert str(found.value).endswith("; give it as recipe=wrap_deepspeed(...)")
