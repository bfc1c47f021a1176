"""examples/early_stopping.py, interrupted and started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import run_python
from tests.examples.running import EXAMPLES


def run(folder: Path, *arguments: str) -> list[str]:
    done = run_python(folder, str(EXAMPLES / "early_stopping.py"), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_run_that_resumes_stops_where_one_does_that_was_not_interrupted(tmp_path: Path) -> None:
    *epochs, best = run(tmp_path, "--out", "whole")
    *first, _ = run(tmp_path, "--out", "stopped", "--max-epochs", "5")
    *rest, best_of_both = run(tmp_path, "--out", "stopped")
    assert first + rest == epochs
    assert best_of_both == best
    assert run(tmp_path, "--out", "whole") == [best]
