"""A run stores what stands in the log's file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def run(*command):
    """Run Python in a process of its own, since libraries keep their folder; return its last line."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1:]


def logged(path):
    """Read a file of lines: values by step, and then by name."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["time"]
    return {line.pop("step"): line for line in lines}


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_run_stores_the_values_of_the_file(library, num_processes, tmp_path):
    launch = ("launch", "-n", num_processes, "--cpu", "--mixed-precision", "no")
    run("-m", "accel_fn.cli", *launch, TRAIN, library, tmp_path)
    [line] = run("-c", READ, library, tmp_path)
    stored, settings = json.loads(line)
    lines = logged(tmp_path / "log.jsonl")
    assert list(lines) == [2, 4, 6, 8]
    assert dict(stored) == {
        step: {name: pytest.approx(value, rel=1e-12, nan_ok=True) for name, value in line.items()}
        for step, line in lines.items()
    }
    assert settings["mixed_precision"] == "no"
    assert settings["plan"].startswith(f"one step on {num_processes} rank")
