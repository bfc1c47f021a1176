"""examples/larger_model.py: two processes lose what one loses, and take half of its memory each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.commands import run_command
from tests.examples.running import EXAMPLES

LINE = re.compile(r"^(build|load_model|a step|save_model) +((?: *\d+ MB)+)$", re.MULTILINE)
PART = re.compile(r"a rank's part (\d+) MB")


def run(folder: Path, size: int, *options: str) -> str:
    """What the program prints; memory goes back to the kernel when it is free."""
    program = ("launch", "-n", str(size), "--cpu", str(EXAMPLES / "larger_model.py"))
    done = run_command(folder, *program, *options, MALLOC_MMAP_THRESHOLD_="262144")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ranks_hold_their_part_while_they_load_train_and_save(tmp_path: Path) -> None:
    alone, two = (run(tmp_path, size) for size in (1, 2))
    losses = [re.search(r"loss (\S+)", each)[1] for each in (alone, two)]
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=2e-5)
    [whole], [part] = PART.findall(alone), PART.findall(two)
    assert int(part) == pytest.approx(int(whole) / 2, rel=0.01)
    peaks = {what: max(map(int, re.findall(r"\d+", line))) for what, line in LINE.findall(two)}
    # The largest tensor, the embedding, is a fifth of the model. Shards are there already in a load.
    largest = int(whole) / 5
    assert peaks["load_model"] < 1.3 * int(part) + largest
    assert peaks["save_model"] < 0.3 * int(part) + 2 * largest
