"""The programs for an accelerator: the page names them, and they run small without one."""

import importlib
import re
import subprocess
import sys

import pytest

from tests.gpu.__main__ import in_short, programs
from tests.support.processes import ROOT

NAMES = [each.name for each in programs(ROOT)]


def test_the_page_lists_the_programs_in_their_order():
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert re.findall(r"^\| \d+ \| `(\w+)` \|", page, re.MULTILINE) == NAMES


@pytest.mark.parametrize("name", NAMES[1:])  # the first one runs pytest
def test_a_program_can_be_imported(name):
    assert callable(importlib.import_module(f"tests.gpu.{name}").main)


@pytest.mark.slow
def test_a_program_that_is_unknown_is_refused_with_the_names():
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--only", "spede"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert f"--only must be of {', '.join(NAMES)}, got spede" in done.stderr


@pytest.mark.slow
def test_a_report_has_the_head_the_output_and_the_exit_code_of_each_program(tmp_path):
    only = ("--only", "offload", "--only", "two_ends", "--folder", tmp_path)
    subprocess.run([sys.executable, "-m", "tests.gpu", *only], cwd=ROOT, check=True)
    report = (tmp_path / "report.txt").read_text()
    assert report.startswith("accel_fn on an accelerator, ")
    assert "DIFFERS" not in report.partition("$ ")[2].partition("== 9")[0]
    codes = re.findall(r"^exit code (\d+) after [\d.]+ s$", report, re.MULTILINE)
    if "REHEARSAL" in report:
        assert codes == ["0", "0", "1", "124", "124", "137"]
        assert report.endswith(
            "== In short\n"
            "offload    exit codes 0; 0 lines that differ or failed\n"
            "two_ends   exit codes 0, 1, 124, 124, 137; 0 lines that differ or failed\n"
        )


def test_the_end_of_a_report_counts_lines_that_differ_or_failed():
    output = "ERROR tests/b.py\nFAILED tests/a.py\nclip 1e-1 DIFFERS\nclip 0.0\nsame bits: False\n"
    line = in_short("equal", f"{output}exit code 1 after 2.0 s\n\n$ b\nexit code 0 after 1.0 s\n")
    assert line == "equal      exit codes 1, 0; 4 lines that differ or failed\n"
