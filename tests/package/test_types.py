"""Type checkers find every mistake in a user's program, and report nothing else."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("users_program.py")
MARKED = {
    number
    for number, line in enumerate(PROGRAM.read_text().splitlines(), start=1)
    if line.endswith("# E")
}


def run(*command):
    done = subprocess.run(
        [sys.executable, "-m", *command, str(PROGRAM)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def mypy_errors():
    text = run("mypy", "--strict", "--no-pretty", "--no-error-summary")
    return [int(line) for line in re.findall(r"^[^:\n]*users_program.py:(\d+): error", text, re.M)]


def basedpyright_errors():
    found = json.loads(run("basedpyright", "--outputjson", "--pythonpath", sys.executable))
    return [
        each["range"]["start"]["line"] + 1
        for each in found["generalDiagnostics"]
        if each["severity"] == "error"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("errors", [mypy_errors, basedpyright_errors])
def test_type_checkers_find_every_mistake_and_no_other(errors):
    assert set(errors()) == MARKED
