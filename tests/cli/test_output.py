"""How commands print on a terminal, and how in a pipe or a file."""

import re
import sys

import click
import pytest

from accel_fn.cli.output import one_line_errors, print_table
from accel_fn.errors import ArgumentError
from tests.cli.commands import run_command, surroundings
from tests.cli.terminal import Terminal

HEADINGS = ["name", "verdict"]
ROWS = [["first", ("holds", "green")], ["the second [of two]", ("broken", "bold red")]]
PROGRAM = f"from accel_fn.cli.output import print_table; print_table({HEADINGS}, {ROWS})"


def on_a_terminal(folder, program=PROGRAM, **variables):
    """Return what the program prints on a terminal of 80 columns."""
    environment = surroundings(folder, TERM="xterm-256color", COLUMNS="80", **variables)
    with Terminal([sys.executable, "-c", program], folder, environment) as screen:
        assert screen.end() == 0
        return screen.text


def test_a_terminal_gets_a_table_in_colours(tmp_path):
    shown = on_a_terminal(tmp_path)
    assert "\x1b[32mholds" in shown
    assert "\x1b[1;31mbroken" in shown
    assert "the second [of two]" in shown
    assert "─" in shown


def test_a_terminal_cuts_no_name(tmp_path):
    rows = [("A_NAME_THAT_IS_LONG_" * 2, "value " * 9, "source/" * 20)]
    program = f"from accel_fn.cli.output import print_table; print_table('abc', {rows})"
    shown = on_a_terminal(tmp_path, program)
    assert rows[0][0] in shown
    assert "…" not in shown
    assert re.sub(r"\s|\x1b\[[0-9;]*m", "", shown).count("source/") > 3
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines())) <= 80


def test_a_terminal_without_colours_gets_none(tmp_path):
    shown = on_a_terminal(tmp_path, NO_COLOR="1")
    assert "holds" in shown
    assert "\x1b[32m" not in shown


def test_anything_else_gets_plain_columns(capsys):
    print_table(HEADINGS, ROWS)
    assert capsys.readouterr().out.splitlines() == [
        "name                 verdict",
        "first                holds",
        "the second [of two]  broken",
    ]


def test_our_errors_are_a_line_and_others_stay_what_they_are():
    with pytest.raises(click.ClickException, match=r"^ours$"), one_line_errors():
        raise ArgumentError("ours")
    with pytest.raises(KeyError), one_line_errors():
        raise KeyError("not ours")


def test_an_unknown_command_gets_the_nearest_name(tmp_path):
    ended = run_command(tmp_path, "launhc", "train.py")
    assert ended.returncode == 2
    assert ended.stderr.endswith("Error: No such command 'launhc'; did you mean launch?\n")
    ended = run_command(tmp_path, "nothing-like-it")
    assert ended.returncode == 2
    assert ended.stderr.endswith("Error: No such command 'nothing-like-it'.\n")
