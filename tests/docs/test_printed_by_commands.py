"""What pages show of `accel-fn explain` and `accel-fn estimate` is what these commands print."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from tests.cli.commands import ROOT, command

CHECKER = doctest.OutputChecker()


def shown(page: str, start: str) -> list[tuple[str, str]]:
    """Return the commands of a page that start so, with what the page shows below each."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(
        rf"^```console\n\$ accel-fn ({start}.*)\n((?:[^`$].*\n)+)```$", text, re.MULTILINE
    )


@pytest.mark.parametrize(("line", "expected"), shown("launching.md", "explain"))
def test_the_plan_of_a_new_program_is_explained_as_shown(
    line: str, expected: str, tmp_path: Path
) -> None:
    assert command(tmp_path, "new", "train.py").exit_code == 0
    done = command(tmp_path, *line.split(), "--device", "cuda")
    assert done.exit_code == 0, done.stderr
    assert CHECKER.check_output(expected, done.stdout, doctest.ELLIPSIS), done.stdout


@pytest.mark.slow
def test_the_estimate_is_as_shown(tmp_path: Path) -> None:
    [program] = re.findall(
        r"^```python\n(# net.py\n.*?)^```$",
        (ROOT / "docs" / "estimate.md").read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    (tmp_path / "net.py").write_text(program, encoding="utf-8")
    [(line, expected)] = shown("estimate.md", "estimate")
    done = command(tmp_path, *line.split(), "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.rstrip() == expected.rstrip()
