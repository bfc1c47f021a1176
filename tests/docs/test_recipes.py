"""The page of recipes on two processes; test_examples.py runs it on one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.commands import ROOT, run_command


@pytest.mark.slow
def test_recipes_run_on_two_processes(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "recipes.py").write_text("\n".join(blocks), encoding="utf-8")
    done = run_command(tmp_path, "launch", "-n", "2", "--cpu", "--mesh", "dp=2", "recipes.py")
    assert done.returncode == 0, done.stderr
