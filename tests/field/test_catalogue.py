"""Each kind of program that people write equals the loop by hand, is refused, or is warned of."""

import random
import re
import subprocess
import sys

import pytest

import tests.field.every  # noqa: F401
from tests.field.catalogue import KINDS, FieldProgram

NUM_DRAWS = 4


def check(drawn):
    assert drawn.verdict() in {KINDS[drawn.name].right, "equal"}, drawn.source()


# Ports import transformers, and train its models. Tests of wrap_fsdp and of resumed schedules have
# cases of the others.
SLOW = {
    "schedules.longer_function",
    "schedules.more_epochs",
    "shards.averaged_model",
    "shards.gradients_by_sample",
    "shards.meta_learning",
    "shards.optimizer_by_norms",
    "shards.optimizer_of_its_own_part",
    "shards.optimizer_that_flattens",
    "shards.optimizer_that_reads_a_norm",
}
SLOW |= {name for name in KINDS if name.startswith("ports.")}
SMALL = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in KINDS]


@pytest.mark.parametrize("name", SMALL)
def test_a_small_program_does_what_is_right_for_its_kind(name):
    check(FieldProgram.small(name))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_DRAWS))
@pytest.mark.parametrize("name", KINDS)
def test_a_program_does_what_is_right_for_its_kind(name, number):
    check(FieldProgram.draw(random.Random(f"{name} {number}"), name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["losses.frozen_teacher", "loops.gan"])
def test_a_printed_program_runs_without_the_catalogue(name, tmp_path):
    text = FieldProgram.draw(random.Random(name), name).source()
    assert "tests" not in text
    command = [sys.executable, "-u", "-c", text]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    by_hand, with_steps = re.findall(r"^(\{|\[)", ran.stdout, re.MULTILINE)
    assert (by_hand, with_steps) == ("{", "["), ran.stderr
