"""A run stores what stands in the log's file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_fn.extend import log_lines
from tests.support.recipes import recipe

ROOT = Path(__file__).parents[2]
TRAIN = Path(__file__).with_name("train.py")
LIBRARIES = ("wandb", "mlflow", "trackio", "aim", "swanlab")


READ = """
import json, sys
from importlib import import_module
from pathlib import Path

_, library, folder = sys.argv
values, settings = import_module(f"tests.trackers.{library}_run").read(Path(folder))
print(json.dumps([sorted(values.items()), settings]))
"""


def run(folder, *command, **variables):
    """Run Python in a process of its own, since libraries keep their folder; return its last line."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1:]


def read(library, folder):
    """Read what a library stored: values by step and then by name, and settings."""
    [line] = run(folder, "-c", READ, library, folder)
    values, settings = json.loads(line)
    return dict(values), settings


def logged(path):
    """Read a log: values by step, and then by name."""
    lines = {}
    for line in log_lines(path):
        del line["time"]
        lines.setdefault(line.pop("step"), {}).update(line)
    return lines


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_run_stores_the_values_of_the_file(library, num_processes, tmp_path):
    launch = ("launch", "-n", num_processes, "--cpu", "--mixed-precision", "no")
    run(tmp_path, "-m", "accel_fn", *launch, TRAIN, library, tmp_path)
    stored, settings = read(library, tmp_path)
    lines = logged(tmp_path / "log.jsonl")
    assert list(lines) == [2, 4, 6, 8]
    assert stored == {
        step: {name: pytest.approx(value, rel=1e-12, nan_ok=True) for name, value in line.items()}
        for step, line in lines.items()
    }
    assert settings["mixed_precision"] == "no"
    assert settings["plan"].startswith(f"one step on {num_processes} rank")


def test_mlflow_stores_values_after_the_end_of_the_active_run(tmp_path):
    program = f"""
from pathlib import Path
from accel_fn.observe.log_writers import as_writer
from tests.trackers.mlflow_run import start

mlflow = start(Path({str(tmp_path)!r}))
writes = [as_writer(mlflow), as_writer(mlflow.active_run())]
mlflow.end_run()
for step, write in enumerate(writes):
    write(step, {{"loss": 2.0}})
"""
    run(tmp_path, "-c", program)
    values, _ = read("mlflow", tmp_path)
    assert values == {0: {"loss": 2.0}, 1: {"loss": 2.0}}


def test_the_recipe_of_wandb_logs_to_it(tmp_path):
    run(tmp_path, "-c", recipe("wandb"), WANDB_MODE="offline")
    values, _ = read("wandb", tmp_path)
    assert set(values) == {*range(10, 161, 10), *range(32, 161, 32)}
