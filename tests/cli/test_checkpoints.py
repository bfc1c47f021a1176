"""`accel-fn checkpoints`, called as a user would."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import accel_fn as af
from accel_fn.cli.checkpoints import checkpoints
from accel_fn.testing import simulate
from tests.support import strategies as ours


def build(model):
    return af.build(af.DistState(), af.Plan(ours.mse, model, ours.adamw(model.parameters())))


@pytest.fixture
def folder(tmp_path):
    state, step = build(ours.regression_model())
    inputs = torch.ones(4, 3).double()
    for _ in range(2):
        state, _ = step(state, (inputs, inputs[:, :1]))
        af.save(tmp_path / "run", state, step)
    return tmp_path / "run"


def test_a_table_lists_the_checkpoints(launchers, folder, tmp_path):
    done = launchers.command(tmp_path, "checkpoints", "run")
    assert (done.exit_code, done.stderr) == (0, "")
    heading, first, second = done.stdout.splitlines()
    assert heading.split() == ["step", "age", "size", "ranks", "whole"]
    assert re.fullmatch(r"1 +\d+ s +[\d.]+ KiB +1 +yes", first)
    assert re.fullmatch(r"2 +\d+ s +[\d.]+ KiB +1 +yes", second)


def test_the_mesh_stands_in_place_of_the_number_of_ranks(tmp_path):
    def run(state):
        state, step = ours.built(af.wrap_ddp(), state)
        af.save(tmp_path, state, step)

    simulate(run, mesh={"dp": 2, "tp": 2})
    table = CliRunner().invoke(checkpoints, [str(tmp_path)]).stdout
    assert re.search(r"KiB +dp 2 x tp 2 +yes$", table.strip())
    (found,) = json.loads(CliRunner().invoke(checkpoints, [str(tmp_path), "--json"]).stdout)
    assert (found["world_size"], found["mesh"]) == (4, {"dp": 2, "tp": 2})


def test_scores_are_listed_where_there_are_any(launchers, tmp_path):
    state, step = build(ours.regression_model())
    af.save(tmp_path / "run", state, step)
    af.save(tmp_path / "run", replace(state, step=3), step, score=0.5)
    done = launchers.command(tmp_path, "checkpoints", "run")
    heading, first, second = done.stdout.splitlines()
    assert (heading.split()[-1], first.split()[-1], second.split()[-1]) == ("score", "-", "0.5")
    done = launchers.command(tmp_path, "checkpoints", "run", "--json")
    assert [each["score"] for each in json.loads(done.stdout)] == [None, 0.5]


def test_a_damaged_checkpoint_is_listed_with_the_missing_file(launchers, folder, tmp_path):
    lost = folder / "step_00000002" / "common.pt"
    lost.unlink()
    done = launchers.command(tmp_path, "checkpoints", "run", "--json")
    assert done.exit_code == 1
    first, second = json.loads(done.stdout)
    assert (first["step"], first["whole"], first["world_size"]) == (1, True, 1)
    assert second["damage"] == "a file of the checkpoint is missing: run/step_00000002/common.pt"
    done = launchers.command(tmp_path, "checkpoints", "run")
    assert "common.pt" in done.stdout.splitlines()[2]


def test_an_empty_folder_is_no_error_and_a_missing_one_is(launchers, tmp_path):
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
    state, step = build(other := ours.regression_model())
    af.load(folder, state, step)
    ours.assert_identical(model.state_dict(), other.state_dict())


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))


def test_export_takes_one_of_several_models_in_files_of_a_size_and_ties_once(launchers, tmp_path):
    saved = two_layers()
    saved[1].weight = saved[0].weight
    state, generator = build(saved)
    steps = {"generator": generator, "critic": build(ours.regression_model())[1]}
    af.save(tmp_path / "run", state, steps)
    options = ("--step", "generator", "--max-shard-size", "40B")
    done = launchers.command(tmp_path, "export", "run/step_00000000", "weights", *options)
    assert (done.exit_code, done.stdout) == (0, "3 tensors written to weights\n")
    sizes = [len(load_file(file)) for file in (tmp_path / "weights").glob("model-*-of-00002*")]
    assert sorted(sizes) == [1, 2]
    af.load_model(model := two_layers(), tmp_path / "weights")
    ours.assert_identical(model.state_dict(), saved.state_dict())


class WithState(torch.nn.Linear):
    def get_extra_state(self):
        return {"count": 3}

    def set_extra_state(self, state):
        pass


def test_state_that_is_no_tensor_is_refused_as_save_model_does(launchers, tmp_path):
    state, step = build(model := WithState(2, 1))
    af.save(tmp_path / "run", state, step)
    done = launchers.command(tmp_path, "export", "run/step_00000000", "weights")
    with pytest.raises(ValueError, match="got a dict for '_extra_state'") as refused:
        af.save_model(model, tmp_path / "weights")
    assert done.stderr == f"Error: {refused.value}\n".replace("save_model", "export")
    assert not (tmp_path / "weights").exists()


def test_mistakes_of_export_are_one_line(launchers, folder, tmp_path):
    done = launchers.command(
        tmp_path, "export", "run/step_00000002", "weights", "--step", "generator"
    )
    assert done.exit_code == 1
    assert done.stderr == (
        "Error: export: step must be one of run/step_00000002, got 'generator'; there are (no name)\n"
    )
    emptied, flipped = (folder / f"step_0000000{step}" / "tensors_00000.bin" for step in (1, 2))
    emptied.write_bytes(b"")
    flipped.write_bytes(bytes([flipped.read_bytes()[0] ^ 1]) + flipped.read_bytes()[1:])
    for damaged in (emptied, flipped):
        place = damaged.parent.relative_to(tmp_path)
        done = launchers.command(tmp_path, "export", place, "weights")
        assert done.stderr.startswith(f"Error: export: {place}/tensors_00000.bin is damaged: ")
    done = launchers.command(tmp_path, "export", "run", "weights")
    assert done.stderr == "Error: export: run is no checkpoint: it has no manifest.json\n"
    assert not (tmp_path / "weights").exists()


def test_folders_of_export_that_cannot_be_written_to_are_one_line(launchers, folder, tmp_path):
    (tmp_path / "file").touch()
    done = launchers.command(tmp_path, "export", "run/step_00000002", "file/weights")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        "Error: export: folder must be one that can be written to, got 'file/weights'; Not a directory\n"
    )


def test_what_is_no_file_is_one_line(launchers, folder, tmp_path):
    """A folder or a link of another program may stand in the place of a file."""
    for step, make in {1: "mkdir", 2: "symlink_to"}.items():
        manifest = folder / f"step_0000000{step}" / "manifest.json"
        manifest.unlink()
        getattr(manifest, make)(*["manifest.json"] * (step - 1))
    done = launchers.command(tmp_path, "checkpoints", "run")
    assert (done.exit_code, done.stderr) == (1, "")
    assert "step_00000001/manifest.json must be a regular file" in done.stdout
    words = "must be a file that can be read (Too many levels of symbolic links)"
    assert f"step_00000002/manifest.json {words}" in done.stdout
    done = launchers.command(tmp_path, "export", "run/step_00000001", "weights")
    assert done.stderr == "Error: export: run/step_00000001/manifest.json must be a regular file\n"


def test_what_safetensors_cannot_hold_is_one_line(launchers, tmp_path):
    model = torch.nn.Linear(2, 1)
    model.register_buffer("waves", torch.zeros(2, dtype=torch.complex128))
    af.save(tmp_path / "run", *build(model))
    done = launchers.command(tmp_path, "export", "run/step_00000000", "weights")
    assert done.stderr == (
        "Error: export: model must hold tensors of the dtypes that safetensors knows, "
        "got torch.complex128 for 'waves'\n"
    )
    assert not (tmp_path / "weights").exists()
