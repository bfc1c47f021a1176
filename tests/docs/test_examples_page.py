"""The table of docs/examples.md holds the examples, and how long each is."""

from __future__ import annotations

import ast
import re

import pytest

from tests.cli.commands import ROOT
from tests.examples.test_programs import PROGRAMS

TEXT = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `(\w+)\.py` \| [^|]+ \| (\d+) \|", TEXT, re.MULTILINE))


def lines_of_code(text: str) -> int:
    """Count lines that are not empty, a comment or a docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
        for number in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    numbered = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and line[0] != "#" and i not in docstrings for i, line in numbered)


def test_the_page_has_a_row_for_each_program() -> None:
    assert set(ROWS) == set(PROGRAMS)


@pytest.mark.parametrize("name", ROWS)
def test_the_page_counts_the_lines_of_a_program(name: str) -> None:
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert int(ROWS[name]) == lines_of_code(text)
