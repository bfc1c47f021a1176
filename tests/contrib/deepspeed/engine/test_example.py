"""examples/deepspeed_zero.py: each stage loses what one process loses, also after a resume."""

import re
import subprocess
import sys

import pytest

from tests.examples.running import EXAMPLES

FIGURE = re.compile(r"\d+\.\d+")


def printed(folder, size):
    """The lines of the program on so many processes."""
    launch = ("-m", "accel_fn", "launch", "-n", str(size), "--cpu")
    command = [sys.executable, *launch, str(EXAMPLES / "deepspeed_zero.py")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("stage")]


def test_every_stage_on_two_processes_prints_the_figures_of_one(tmp_path):
    texts = []
    for size in (1, 2):
        (tmp_path / str(size)).mkdir()
        texts.append("\n".join(printed(tmp_path / str(size), size)))
    assert FIGURE.split(texts[0]) == FIGURE.split(texts[1])
    one, two = (list(map(float, FIGURE.findall(each))) for each in texts)
    assert len(one) == 2 * (3 * 2 + 2)
    # Rounding of float32 may move the last of the four decimals.
    assert one == pytest.approx(two, rel=0, abs=1.01e-4)
