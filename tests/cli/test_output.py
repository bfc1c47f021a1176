"""How commands print on a terminal, and how in a pipe or a file; what they import for their help."""

import os
import re
import resource
import sys

import pytest

from tests.cli.commands import ROOT, command, run_python, surroundings
from tests.cli.terminal import Terminal
from tests.support.launch_settings import written

COMMANDS = ["launch", "new", "config", "env", "test", "estimate", "report", "plot", "watch"]
COMMANDS += ["checkpoints", "export", "migrate", "explain"]


def test_a_terminal_gets_a_table_in_colours_that_cuts_no_name(tmp_path):
    place = tmp_path / "a_name_that_is_long" / "of_a_folder" / "in_a_deep_folder" / "of_a_program"
    written(place, "log_dir: logs\n")
    show = [sys.executable, "-m", "accel_fn", "config", "--show"]
    environment = surroundings(tmp_path, TERM="xterm-256color", COLUMNS="80")
    with Terminal(show, place, environment) as screen:
        assert screen.end() == 0
        shown = screen.text
    assert "\x1b[2mnum_processes" in shown
    assert "─" in shown
    assert "…" not in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert max(map(len, plain.splitlines())) <= 80
    assert "/in_a_deep_folder/of_a_program/accel_fn.yaml" in re.sub(r"\s", "", plain)


def test_anything_else_gets_plain_columns(tmp_path):
    lines = command(tmp_path, "config", "--show").stdout.splitlines()
    starts = [lines[0].index(heading) for heading in ("setting", "value", "source")]
    for line in lines:
        assert re.match(r"\S+ +$", line[: starts[1]])
        assert all(line[start - 2 : start] == "  " != line[start] for start in starts[1:])
    assert lines == [line.rstrip() for line in lines]


def test_an_unknown_command_gets_the_nearest_name(tmp_path):
    ended = command(tmp_path, "launhc", "train.py")
    assert ended.exit_code == 2
    assert ended.stderr.endswith("Error: No such command 'launhc'; did you mean launch?\n")
    ended = command(tmp_path, "nothing-like-it")
    assert ended.exit_code == 2
    assert ended.stderr.endswith("Error: No such command 'nothing-like-it'.\n")


CALLS = """
import sys
from accel_fn.cli import main

for arguments in {calls}:
    sys.argv = ["accel-fn", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, arguments
"""


@pytest.mark.parametrize(
    ("calls", "without", "seconds"),
    [
        ([["--help"], *([each, "--help"] for each in COMMANDS)], ["torch"], 1.5),
        ([["config", "--show"], ["launch", "--cpu", "--dry-run", "script.py"]], ["torch"], 1.2),
    ],
    ids=["help", "settings"],
)
def test_what_needs_no_torch_is_quick_and_does_not_import_it(tmp_path, calls, without, seconds):
    (tmp_path / "script.py").touch()
    for name in without:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('it was imported')\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_python(tmp_path, "-c", CALLS.format(calls=calls), PYTHONPATH=paths)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: accel-fn ") == sum("--help" in call for call in calls)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used_s < seconds  # CPU time, since other processes may keep the machine busy
