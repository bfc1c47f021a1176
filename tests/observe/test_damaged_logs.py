"""Logs that something has damaged: training goes on."""

import os

import pytest

import accel_fn as af
from accel_fn.extend import log_lines
from tests.observe.test_log_files import SUFFIXES, steps_in
from tests.observe.test_log_to import BATCHES, small_plan, train


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_log_that_is_cut_to_nothing_goes_on_without_a_hole(suffix, tmp_path):
    """As logrotate does with `copytruncate`: values are added to a line that is gone."""
    path = tmp_path / f"log{suffix}"
    state, step, _ = train(small_plan(af.log_to(path, every=1)), BATCHES[:2])
    os.truncate(path, 0)
    state, _ = step(state, BATCHES[2])
    assert steps_in(path) == [3]
    os.truncate(path, 0)
    af.log_values(step, state, {"mine": 1.0})
    state, _ = step(state, BATCHES[3])
    assert steps_in(path) == [3, 4]
    first, second = log_lines(path)
    assert ("mine" in first, "mine" in second) == (True, False)
    assert "loss" in second


HOLE = b"\0" * 300
DAMAGE = {
    "a hole at the start": lambda lines: [HOLE + lines[0], *lines[1:]],
    "a hole before a line": lambda lines: [*lines[:-1], HOLE + lines[-1]],
    "a line of zeros": lambda lines: [*lines[:2], HOLE + b"\n", *lines[2:]],
    "a line that is cut": lambda lines: [*lines[:2], lines[2][:9] + b"\n", *lines[3:]],
    "nothing but zeros": lambda lines: [HOLE, b"\n"],
    "another file": lambda lines: [b"a,b\n"],
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_log_is_set_aside_and_the_run_goes_on(suffix, damage, tmp_path, capfd):
    path = tmp_path / f"log{suffix}"
    train(small_plan(af.log_to(path, every=1)), BATCHES[:3])
    path.write_bytes(damaged := b"".join(DAMAGE[damage](path.read_bytes().splitlines(True))))
    for number in (1, 2):
        after, step = af.build(small_plan(af.log_to(path, every=1)), af.DistState(step=3))
        after, _ = step(after, BATCHES[3])
        del step
        assert steps_in(path)[-1] == 4
        [aside] = tmp_path.glob("*.damaged-*")
        assert aside.name == f"log{suffix}.damaged-1"
        assert aside.read_bytes() == damaged
        warned = "has lines that cannot be read; it is now log" in capfd.readouterr().err
        assert warned == (number == 1)
    assert set(steps_in(path)) <= {1, 2, 3, 4}


def test_whole_lines_of_a_damaged_log_stay(tmp_path):
    path = tmp_path / "log.jsonl"
    train(small_plan(af.log_to(path, every=1)), BATCHES[:3])
    lines = path.read_bytes().splitlines(True)
    path.write_bytes(b"".join([HOLE + lines[0], *lines[1:]]))
    af.build(small_plan(af.log_to(path, every=1)), af.DistState(step=3))
    assert path.read_bytes() == b"".join(lines[1:])


@pytest.mark.parametrize("name", ["\ud800", "a\x1b[2J", "tab\there", "line\u2028end"])
def test_names_that_no_terminal_can_print_are_refused_by_log_values(name, tmp_path):
    state, step, _ = train(small_plan(af.log_to(tmp_path / "log.csv")), BATCHES[:1])
    words = "log_values: values must have printable names of one line, .* got "
    with pytest.raises(ValueError, match=words) as caught:
        af.log_values(step, state, {name: 1.0})
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("digits", [400, 5000])
def test_an_integer_that_no_float_is_near_to_is_refused_by_log_values(digits, tmp_path):
    state, step, _ = train(small_plan(af.log_to(tmp_path / "log.csv")), BATCHES[:1])
    with pytest.raises(
        ValueError, match="log_values: values must be numbers by name, got "
    ) as caught:
        af.log_values(step, state, {"big": 10**digits})
    assert len(str(caught.value)) < 400
