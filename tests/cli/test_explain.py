"""`accel-fn explain` of a plan that is given by name, and the completion of names in a shell."""

import json
import subprocess
import sys

import pytest
import torch

from tests.cli.commands import ROOT, command, surroundings

TRAIN = """
import torch
import torch.nn.functional as F
from torch import nn

import accel_fn as af
from sizes import NUM_INPUTS

def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])

def make_plan(num_parts=2):
    model = nn.Linear(NUM_INPUTS, 1)
    plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.5))
    recipe = af.compose(af.place(), af.wrap_ddp(), af.accumulate(num_parts), af.clip(1.0))
    return recipe(plan)

def as_launched():
    model = nn.Linear(NUM_INPUTS, 1)
    plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.5))
    return af.compose(af.with_amp(), af.wrap_as_launched(), af.accumulate())(plan)

class Recipes:
    simple = make_plan(1)

def needs_more(plan):
    return plan

def fails():
    raise LookupError("no data here")

number = 3

if __name__ == "__main__":
    raise SystemExit("a file is imported, not run")
"""


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "explain"
    place.mkdir()
    (place / "train.py").write_text(TRAIN)
    (place / "sizes.py").write_text("NUM_INPUTS = 4\n")
    return place


def explained(folder, *arguments, **variables):
    """Run the command; return the lines that it prints."""
    done = command(folder, "explain", *arguments, **variables)
    assert done.exit_code == 0, done.stderr
    return done.stdout.splitlines()


def test_the_command_prints_the_step_of_a_number_of_ranks(folder):
    """The command runs in another folder than the file, and finds what the file imports."""
    target = f"{folder.name}/train.py:make_plan"
    assert explained(folder.parent, target, "-n", 4, "--device", "cuda:1") == [
        "one step on 4 ranks, cuda:1",
        "  model      place()",
        "  split      accumulate(2)",
        "  weigh      count_samples, summed over 4 ranks",
        "  place      place()",
        "  forward    loss_fn(Linear, batch)",
        "  backward   the mean over the global batch, by wrap_ddp()",
        "  gradients  clip(1.0)",
        "  update     SGD(lr=0.5), 2 parameter tensors, 5 numbers",
    ]


_SAID = [
    "  split      accumulate(), 3 from the launch",
    "  forward    loss_fn(Linear, batch) under with_amp(), bf16 from the launch",
    "  backward   the mean over the global batch, by wrap_as_launched(), fsdp from the launch",
]
_UNSAID = [
    "  start      with_amp(), no autocast since the launch sets no --mixed-precision, "
    "then accumulate(), 1 micro-batch since the launch sets no --num-microbatches",
    "  forward    loss_fn(Linear, batch)",
    "  backward   the mean over the global batch, by wrap_as_launched(), ddp since the launch sets no --wrap",
]
_OF_ACCELERATE = (
    "{compute_environment: LOCAL_MACHINE, distributed_type: MULTI_CPU, use_cpu: true, "
    "num_processes: 64, mixed_precision: bf16}"
)
_VARIABLES = {"ACCEL_FN_WRAP": "fsdp", "ACCEL_FN_NUM_MICROBATCHES": "3"}


@pytest.mark.parametrize(
    ("file", "variables", "arguments", "first", "lines"),
    [
        ("tee: true", {}, ["-n", "2"], "2 ranks", _UNSAID),
        ("{wrap: fsdp, mixed_precision: bf16, num_microbatches: 3}", {}, ["-n", "2"], "2 ranks", _SAID),
        ("{cpu: true, num_processes: 64, wrap: ddp, mixed_precision: bf16}", _VARIABLES, [],
         "64 ranks, cpu", _SAID),
        ("{cpu: true, num_processes: 64}", {}, ["-n", "2", "--device", "cuda:1"],
         "2 ranks, cuda:1", _UNSAID),
        ("num_processes: 8", _VARIABLES, ["--config", "theirs.yaml"], "64 ranks, cpu", _SAID),
    ],
    ids=["nothing", "file", "variables before the file", "arguments before the file", "accelerate's"],
)  # fmt: skip
def test_the_phases_follow_the_settings_of_a_launch_from_here(
    folder, tmp_path, file, variables, arguments, first, lines
):
    """The settings are those of the working folder, wherever the target is."""
    (tmp_path / "accel_fn.yaml").write_text(file)
    (tmp_path / "theirs.yaml").write_text(_OF_ACCELERATE)
    shown = explained(tmp_path, f"{folder}/train.py:as_launched", *arguments, **variables)
    assert shown[0].startswith(f"one step on {first}")
    assert {*lines} <= {*shown}


def test_programs_get_the_phases_of_a_plan_in_a_module(folder):
    shown = json.loads("\n".join(explained(folder, "train:Recipes.simple", "-n", 1, "--json")))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert (shown["num_processes"], shown["mesh"]) == (1, {"dp": 1})
    assert shown["device"] == str(accelerator or "cpu")
    assert shown["phases"]["backward"] == (
        "the mean over the global batch; wrap_ddp() has nothing to do"
    )
    assert list(shown["phases"]) == [
        "model", "split", "weigh", "place", "forward", "backward", "gradients", "update",
    ]  # fmt: skip


def test_the_mesh_is_that_of_the_option_else_of_the_launch(folder):
    given = ["train.py:make_plan", "--device", "cpu", "-n"]
    lines = explained(folder, *given, 8, ACCEL_FN_MESH="dp=-1,tp=4")
    assert lines[0] == "one step on 8 ranks (dp 2 x tp 4), cpu"
    lines = explained(folder, *given, 8, "--mesh", "dp=4,tp=2", ACCEL_FN_MESH="dp=-1,tp=4")
    assert lines[0] == "one step on 8 ranks (dp 4 x tp 2), cpu"


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (["train.py"], "target must be FILE.py:NAME or MODULE:NAME, got 'train.py'"),
        (["train.py:"], "target must be FILE.py:NAME or MODULE:NAME, got 'train.py:'"),
        (["trian.py:make_plan"], "target must name a file that is there, got 'trian.py'"),
        (["trian:make_plan"], "target must name a module that can be imported from here, got 'trian'"),
        (["./train:make_plan"], "got './train'; ./train.py is a file: write ./train.py:NAME"),
        (["train.py:make_plam"], "target must name something in train.py, got 'make_plam'; did you mean"),
        (["train.py:Recipes.simpel"], "got 'simpel'; did you mean simple?"),
        (["train.py:number"], "target must name what can be called without arguments, got 'train.py:number'"),
        (["train.py:needs_more"], "got 'train.py:needs_more'; missing a required argument: 'plan'"),
        (["train.py:Recipes"], "got 'train.py:Recipes (Recipes)'"),
        (["train.py:make_plan", "--device", "gpu"], "device must be torch's, got 'gpu'"),
        (["train.py:make_plan", "-n", 6, "--mesh", "dp=-1,tp=4"], "mesh must have sizes that divide the"),
        (["train.py:make_plan", "--mesh", "ep=4"], "mesh must be axes (pp, dp, cp, tp) with sizes"),
        (["train.py:make_plan", "--config", "no.yaml"], "config: file must exist, got 'no.yaml'"),
    ],
)  # fmt: skip
def test_what_cannot_be_explained_is_one_line(folder, target, text):
    done = command(folder, "explain", *target)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_the_users_code_raises_is_shown_with_its_line(folder):
    (folder / "broken.py").write_text("import no_such_thing\n")
    done = command(folder, "explain", "train.py:fails")
    assert done.exit_code == 1
    assert f'File "{(folder / "train.py").resolve()}", line' in done.stderr
    assert done.stderr.rstrip().endswith("LookupError: no data here")
    for target in ("broken:plan", "broken.py:plan"):
        error = command(folder, "explain", target).stderr
        assert "ModuleNotFoundError: No module named 'no_such_thing'" in error


def test_a_file_with_the_name_of_a_module_replaces_none(folder):
    (folder / "json.py").write_text(TRAIN)
    assert explained(folder, "json.py:make_plan")[-1].endswith("2 parameter tensors, 5 numbers")
    assert sys.modules["json"] is json


@pytest.mark.slow
def test_completion_of_a_shell_knows_commands_options_and_files(tmp_path):
    """A real bash runs the line that the documentation gives."""
    program = tmp_path / "accel-fn"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m accel_fn "$@"\n')
    program.chmod(0o755)
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    script = """
        PATH="$PWD:$PATH"
        eval "$(_ACCEL_FN_COMPLETE=bash_source accel-fn)"
        complete_line() {
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
            _accel_fn_completion accel-fn
            echo "${COMPREPLY[*]}"
        }
        compopt() { echo "as bash completes files"; }
        complete_line accel-fn la
        complete_line accel-fn e
        complete_line accel-fn explain --dev
        complete_line accel-fn launch tr
        complete_line accel-fn launch train.py da
        complete_line accel-fn explain tr
        complete_line accel-fn estimate tr
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=tmp_path,
        env=surroundings(tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}"),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    of_names, of_files = done.stdout.splitlines()[:3], done.stdout.splitlines()[3:]
    assert of_names == ["launch", "env estimate export explain", "--device"]
    assert of_files == ["as bash completes files", ""] * 4
