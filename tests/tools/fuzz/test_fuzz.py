"""The fuzzer finds a planted bug, prints it as a short program, and survives a program that
aborts."""

import os
import re
import subprocess
import sys

import pytest

import accel_fn as af
from tests.support.processes import ROOT
from tests.tools.fuzz.__main__ import draw
from tests.tools.fuzz.choices import FIELDS
from tests.tools.fuzz.judge import Judge, fails, printed, shrunk
from tests.tools.fuzz.programs import ChosenProgram

SIMPLE = {field: next(iter(choices)) for field, choices in FIELDS.items()}
EVERY = [(field, name) for field, choices in FIELDS.items() for name in choices]


@pytest.mark.parametrize(("field", "name"), EVERY)
def test_every_choice_alone_is_a_program_that_equals_the_loop_by_hand_or_is_refused(field, name):
    assert ChosenProgram({**SIMPLE, field: name}).verdict() in {"equal", "refused", "undefined"}


def test_a_program_of_one_choice_has_under_forty_lines():
    programs = [printed(ChosenProgram({**SIMPLE, field: name}), "") for field, name in EVERY]
    assert [each for each in programs if len(each.splitlines()) >= 40] == []


PLANT_AND_HUNT = """
import sys, accel_fn as af
right = af.clip
af.clip = lambda max_norm: right(2 * max_norm)
from tests.tools.fuzz.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
def test_a_planted_bug_is_found_and_printed_as_a_program_that_shows_it():
    """In a new process, since a judge's fork would inherit the ranks that were simulated here."""
    options = ("--first", "--minutes", "2", "--only", "choices")
    hunted = python(PLANT_AND_HUNT, *options)
    assert hunted.returncode == 1, hunted.stderr
    _, program = hunted.stdout.split("\n# program ")
    assert "[('clip', 'norm')]" in program
    assert "differs by" in program
    ran = python(program.partition("\n")[2])
    (world_size,) = re.findall(r"^SIZES, W = .*, (\d)$", program, re.MULTILINE)
    assert len(ran.stdout.splitlines()) == 1 + int(world_size), ran.stderr


def python(program, *options):
    command = [sys.executable, "-c", program, *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("planted", "text"), [(os.abort, "ended with code -6"), (lambda: 1 / 0, "ZeroDivision")]
)
def test_a_program_that_ends_its_process_is_a_failure_like_any_other(monkeypatch, planted, text):
    monkeypatch.setattr(af, "skip_nonfinite", lambda: planted())
    with Judge() as judge:
        assert text in judge(ChosenProgram({**SIMPLE, "skip": "nothing to skip"}))
        assert judge(ChosenProgram(SIMPLE)) == "equal"


def test_shrinking_keeps_what_makes_a_program_fail():
    needed = {"hook": "clamp", "loss": "sum"}
    program = ChosenProgram({**SIMPLE, **needed, "world": "3", "optimizer": "adamw"})

    def judge(each):
        return "bad" if needed.items() <= each.choices.items() else "equal"

    assert shrunk(program, judge) == ChosenProgram({**SIMPLE, **needed})
    assert fails("bad")


def test_programs_of_a_number_are_the_same_in_every_run():
    assert draw(7, seed=0) == draw(7, seed=0)
