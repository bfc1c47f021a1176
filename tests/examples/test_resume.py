"""examples/resume.py, as its docstring says, under the real launcher."""

from __future__ import annotations

import re

import pytest

from tests.cli.commands import run_command
from tests.examples.running import EXAMPLES


@pytest.mark.slow
def test_a_run_that_is_killed_twice_ends_with_the_bits_of_one_that_was_not(tmp_path):
    hashes = []
    for name, kills in (("whole", ()), ("killed", ("--kill-at", "7,17"))):
        done = run_command(
            tmp_path,
            *("launch", "-n", "2", "--cpu", "--max-restarts", "2"),
            str(EXAMPLES / "resume.py"),
            *("--epochs", "2", "--save-every", "5", "--out", name, *kills),
        )
        assert done.returncode == 0, done.stderr
        restarts = re.findall(r"restart (\d) of 2: rank 1 .*SIGKILL", done.stderr)
        assert restarts == (["1", "2"] if kills else [])
        (found,) = re.findall(r"^24 updates, weights ([0-9a-f]{64})$", done.stdout, re.MULTILINE)
        hashes.append(found)
    assert hashes[0] == hashes[1]
    kept = sorted(path.name for path in (tmp_path / "killed").glob("step_*"))
    # the run resumed from one of these
    assert kept == ["step_00000015", "step_00000020", "step_00000024"]
