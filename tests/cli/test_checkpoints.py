"""accel-fn checkpoints, as a user would call it."""

from __future__ import annotations

import json
import re

import pytest
import torch

import accel_fn as af
from tests import strategies as ours


@pytest.fixture
def folder(tmp_path):
    model = ours.regression_model()
    plan = af.Plan(ours.mse, model, ours.adamw(model.parameters()))
    state, step = af.build(af.DistState(), plan)
    inputs = torch.ones(4, 3).double()
    for _ in range(2):
        state, _ = step(state, (inputs, inputs[:, :1]))
        af.save(tmp_path / "run", state, step)
    return tmp_path / "run"


def test_a_table_says_what_is_there(launchers, folder, tmp_path):
    done = launchers.command(tmp_path, "checkpoints", "run")
    assert (done.exit_code, done.stderr) == (0, "")
    heading, first, second = done.stdout.splitlines()
    assert heading.split() == ["step", "age", "size", "ranks", "whole"]
    assert re.fullmatch(r"1 +\d+ s +[\d.]+ kB +1 +yes", first)
    assert re.fullmatch(r"2 +\d+ s +[\d.]+ kB +1 +yes", second)


def test_one_that_is_not_whole_is_told_with_the_file(launchers, folder, tmp_path):
    lost = folder / "step_00000002" / "common.pt"
    lost.unlink()
    done = launchers.command(tmp_path, "checkpoints", "run", "--json")
    assert done.exit_code == 1
    first, second = json.loads(done.stdout)
    assert (first["step"], first["whole"], first["world_size"]) == (1, True, 1)
    assert second["damage"] == "a file of the checkpoint is missing: run/step_00000002/common.pt"
    done = launchers.command(tmp_path, "checkpoints", "run")
    assert "common.pt" in done.stdout.splitlines()[2]


def test_an_empty_folder_and_none_are_told_apart(launchers, tmp_path):
    (tmp_path / "run").mkdir()
    done = launchers.command(tmp_path, "checkpoints", "run")
    assert (done.exit_code, done.stdout) == (0, "no checkpoint in run\n")
    done = launchers.command(tmp_path, "checkpoints", "nowhere")
    assert done.exit_code == 2
    assert "'nowhere' does not exist" in done.stderr


def test_export_writes_weights_that_load_without_the_program(launchers, folder, tmp_path):
    done = launchers.command(tmp_path, "export", "run/step_00000002", "weights")
    assert (done.exit_code, done.stdout) == (0, "4 tensors written to weights\n")
    model = ours.regression_model(seed=3)
    af.load_model(model, tmp_path / "weights")
    state, step = af.build(
        af.DistState(),
        af.Plan(ours.mse, other := ours.regression_model(), ours.adamw(other.parameters())),
    )
    af.load(folder, state, step)
    ours.assert_identical(model.state_dict(), other.state_dict())


def test_mistakes_of_export_are_one_line(launchers, folder, tmp_path):
    done = launchers.command(
        tmp_path, "export", "run/step_00000002", "weights", "--step", "generator"
    )
    assert done.exit_code == 1
    assert done.stderr == (
        "Error: export: step must be one of run/step_00000002, got 'generator'; there are (no name)\n"
    )
    (folder / "step_00000001" / "tensors_00000.bin").write_bytes(b"")
    done = launchers.command(tmp_path, "export", "run/step_00000001", "weights")
    assert done.stderr.startswith("Error: export: run/step_00000001/tensors_00000.bin is damaged: ")
    done = launchers.command(tmp_path, "export", "run", "weights")
    assert done.stderr == "Error: export: run is no checkpoint: it has no manifest.json\n"
    assert not (tmp_path / "weights").exists()
