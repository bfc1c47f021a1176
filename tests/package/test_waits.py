"""No wait without an owner: docs/waits.md names what ends each wait of the library, and its test."""

import ast
import re
from pathlib import Path

import pytest

from tests.package.sources import PACKAGE, SOURCES, nodes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/waits.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| `")
]
WAITS = {"wait", "result", "acquire", "synchronize", "flock", "sleep", "communicate"}


def waits(path):
    """Whether a file calls what waits: a wait, a join of a thread or a process, a queue's get."""
    for node in nodes(path, ast.Call):
        if not isinstance(node.func, ast.Attribute):
            continue
        name, of = node.func.attr, ast.unparse(node.func.value)
        joins = name == "join" and re.search(r"thread|process|worker|writing|reader|self$", of)
        gets = name == "get" and re.search(r"ready|endings|queue$", of)
        if name in WAITS or joins or gets:
            return True
    return False


def test_each_file_that_waits_has_a_row():
    waiting = {f"{path.relative_to(PACKAGE)}" for path in SOURCES if waits(path)}
    assert waiting - {file for row in ROWS for file in re.findall(r"`(.+?\.py)`", row[0])} == set()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_files_and_tests_of_a_row_exist(row):
    files, ended, tests = row
    assert ended
    for file in re.findall(r"`(.+?\.py)`", files):
        assert (ROOT / "accel_fn" / file).exists()
    named = re.findall(r"`(.+?)::(.+?)`", tests)
    assert named
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text()
