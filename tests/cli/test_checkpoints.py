"""`accel-fn checkpoints` and `accel-fn export`: what they print, write and refuse."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import accel_fn as af
from accel_fn.testing import simulate
from tests.cli.commands import command
from tests.support import strategies as ours


def build(model):
    return af.build(af.Plan(ours.mse, model, ours.adamw(model.parameters())), af.DistState())


@pytest.fixture
def folder(tmp_path):
    state, step = build(ours.regression_model())
    inputs = torch.ones(4, 3).double()
    for _ in range(2):
        state, _ = step(state, (inputs, inputs[:, :1]))
        af.save(step, state, tmp_path / "run")
    return tmp_path / "run"


def test_a_table_lists_the_checkpoints(folder, tmp_path):
    done = command(tmp_path, "checkpoints", "run")
    assert (done.exit_code, done.stderr) == (0, "")
    heading, first, second = done.stdout.splitlines()
    assert heading.split() == ["step", "age", "size", "ranks", "whole"]
    assert re.fullmatch(r"1 +\d+ s +[\d.]+ KiB +1 +yes", first)
    assert re.fullmatch(r"2 +\d+ s +[\d.]+ KiB +1 +yes", second)


def test_the_mesh_stands_in_place_of_the_number_of_ranks(tmp_path):
    def run(state):
        state, step = ours.built(af.wrap_ddp(), state)
        af.save(step, state, tmp_path / "run")

    simulate(run, mesh={"dp": 2, "tp": 2})
    table = command(tmp_path, "checkpoints", "run").stdout
    assert re.search(r"KiB +dp 2 x tp 2 +yes$", table.strip())
    (found,) = json.loads(command(tmp_path, "checkpoints", "run", "--json").stdout)
    assert (found["world_size"], found["mesh"]) == (4, {"dp": 2, "tp": 2})


def test_scores_are_listed_where_there_are_any(tmp_path):
    state, step = build(ours.regression_model())
    af.save(step, state, tmp_path / "run")
    af.save(step, replace(state, step=3), tmp_path / "run", score=0.5)
    lines = command(tmp_path, "checkpoints", "run").stdout.splitlines()
    assert [line.split()[-1] for line in lines] == ["score", "-", "0.5"]
    done = command(tmp_path, "checkpoints", "run", "--json")
    assert [each["score"] for each in json.loads(done.stdout)] == [None, 0.5]


def test_a_damaged_checkpoint_is_listed_with_the_missing_file(folder, tmp_path):
    (folder / "step_00000002" / "common.pt").unlink()
    done = command(tmp_path, "checkpoints", "run", "--json")
    assert done.exit_code == 1
    first, second = json.loads(done.stdout)
    assert (first["step"], first["whole"], first["world_size"]) == (1, True, 1)
    assert second["damage"] == "a file of the checkpoint is missing: run/step_00000002/common.pt"
    assert "common.pt" in command(tmp_path, "checkpoints", "run").stdout.splitlines()[2]


def test_an_empty_folder_is_no_error_and_a_missing_one_is(tmp_path):
    (tmp_path / "run").mkdir()
    done = command(tmp_path, "checkpoints", "run")
    assert (done.exit_code, done.stdout) == (0, "no checkpoint in run\n")
    done = command(tmp_path, "checkpoints", "nowhere")
    assert done.exit_code == 2
    assert "'nowhere' does not exist" in done.stderr


def test_export_writes_weights_that_load_without_the_program(folder, tmp_path):
    done = command(tmp_path, "export", "run/step_00000002", "weights")
    assert (done.exit_code, done.stdout) == (0, "4 tensors written to weights\n")
    model = ours.regression_model(seed=3)
    af.load_model(model, tmp_path / "weights")
    state, step = build(other := ours.regression_model())
    af.load(step, state, folder)
    ours.assert_identical(model.state_dict(), other.state_dict())


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))


def test_export_takes_one_of_several_models_in_files_of_a_size_and_ties_once(tmp_path):
    saved = two_layers()
    saved[1].weight = saved[0].weight
    state, generator = build(saved)
    steps = {"generator": generator, "critic": build(ours.regression_model())[1]}
    af.save(steps, state, tmp_path / "run")
    options = ("--step", "generator", "--max-shard-size", "40B")
    done = command(tmp_path, "export", "run/step_00000000", "weights", *options)
    assert (done.exit_code, done.stdout) == (0, "3 tensors written to weights\n")
    sizes = [len(load_file(file)) for file in (tmp_path / "weights").glob("model-*-of-00002*")]
    assert sorted(sizes) == [1, 2]
    af.load_model(model := two_layers(), tmp_path / "weights")
    ours.assert_identical(model.state_dict(), saved.state_dict())


class WithState(torch.nn.Linear):
    """A module whose checkpoint holds what is no tensor."""

    def get_extra_state(self):
        return {"count": 3}

    def set_extra_state(self, state):
        pass


def complex_waves():
    model = torch.nn.Linear(2, 1)
    model.register_buffer("waves", torch.zeros(2, dtype=torch.complex128))
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: WithState(2, 1), "got a dict for '_extra_state'"),
        (complex_waves, "got torch.complex128 for 'waves'"),
    ],
    ids=["no tensor", "no dtype of safetensors"],
)
def test_what_export_cannot_write_is_one_line(tmp_path, make, text):
    af.save(*reversed(build(make())), tmp_path / "run")
    done = command(tmp_path, "export", "run/step_00000000", "weights")
    assert done.stderr.startswith("Error: export: model must ")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "weights").exists()


def test_mistakes_of_export_are_one_line(folder, tmp_path):
    (tmp_path / "file").touch()
    place = "run/step_00000002"
    for arguments, error in (
        ([place, "weights", "--step", "generator"],
         f"step must be one of {place}, got 'generator'; there are (no name)"),
        (["run", "weights"], "run is no checkpoint: it has no manifest.json"),
        ([place, "file/weights"],
         "folder must be one that can be written to, got 'file/weights'; Not a directory"),
    ):  # fmt: skip
        done = command(tmp_path, "export", *arguments)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr == f"Error: export: {error}\n"
    emptied, flipped = (folder / f"step_0000000{step}" / "tensors_00000.bin" for step in (1, 2))
    emptied.write_bytes(b"")
    flipped.write_bytes(bytes([flipped.read_bytes()[0] ^ 1]) + flipped.read_bytes()[1:])
    for damaged in (emptied, flipped):
        place = damaged.parent.relative_to(tmp_path)
        done = command(tmp_path, "export", place, "weights")
        assert done.stderr.startswith(f"Error: export: {place}/tensors_00000.bin is damaged: ")
    assert not (tmp_path / "weights").exists()
