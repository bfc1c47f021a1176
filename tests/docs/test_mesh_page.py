"""The page on meshes: its program is `examples/circle.py` with its diff, and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.commands import ROOT, run_command

PAGE = (ROOT / "docs" / "choosing-a-mesh.md").read_text(encoding="utf-8")
[DIFF] = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PROGRAM = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[0]
[SHOWN] = re.findall(r"^```console\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def side(sign: str) -> str:
    """Return the lines of both sides of the diff, and those with this sign."""
    return "".join(f"{line[1:]}\n" for line in DIFF.splitlines() if line[0] in (" ", sign))


def test_the_program_is_the_example_with_the_diff() -> None:
    example = (ROOT / "examples" / "circle.py").read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert example.count(side("-")) == 1
    assert example.replace(side("-"), side("+")) == PROGRAM


@pytest.mark.slow
def test_the_program_prints_what_the_page_shows(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    alone, on_mesh = (
        [line for line in shown.splitlines() if line.startswith("epoch")]
        for shown in SHOWN.split("$ accel-fn")
    )
    [command] = re.findall(r"^\$ accel-fn (.*)$", SHOWN, re.MULTILINE)
    done = run_command(tmp_path, *command.split())
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert alone == on_mesh == [printed[0], printed[-1]]
