"""Logs that something has damaged: training goes on, and commands print lines instead of a traceback."""

import copy
import json
import math
import os
import re
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.observe.run_log import read_run
from tests.cli.commands import command
from tests.observe.histories import History
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
    columns = read_run(path, "").columns
    assert columns["mine"].steps == [3]
    assert columns["loss"].steps[-1] == 4


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


JUNK = [
    *(10**400, -(10**400), 10**20, -1, 1e308, -1e308, 5e-324, math.nan, math.inf, 1e15),
    *(None, True, "x", "\ud800", "\x1b[31m", [], {}, [1], 0.5),
]
NAMES = [
    "step",
    "time",
    "loss",
    "\ud800",
    "a\x1b[2J/loss",
    "",
    "/",
    "a\nb",
    "event",
    "seconds",
    "lost_step",
]
PLACES = st.tuples(st.booleans(), st.integers(0, 10**6), st.integers(0, 10**6))
FIELDS = st.tuples(PLACES, st.sampled_from(JUNK), st.none() | st.sampled_from(NAMES))
RAW = st.tuples(PLACES, st.binary(max_size=6) | st.just(HOLE))


def history(seed):
    made = History(every=1)
    for _ in made.processes(Random(seed).randrange(2)):
        for _ in range(4):
            made.update(20, skipped=made.step == 2)
            if made.step % 3 == 0:
                made.save(500)
    for entry in made.lines:
        entry |= {"loss": 1 / entry["step"], "samples_per_second": 60.0, "peak_memory": 2**30}
    return made


HISTORIES = [history(seed) for seed in range(2)]


def write_damaged(folder, which, fields, raws):
    """Write a log, with other values and names of some fields, and other bytes in some lines."""
    made = copy.deepcopy(HISTORIES[which])
    for (is_event, line, key), value, name in fields:
        entries = made.events if is_event else made.lines
        entry = entries[line % len(entries)]
        name_before = [*entry][key % len(entry)]
        del entry[name_before]
        entry[name_before if name is None else name] = value
    folder.mkdir()
    for file, entries, is_event in (
        ("log.jsonl", made.lines, False),
        ("log.events.jsonl", made.events, True),
    ):
        lines = [json.dumps(entry).encode() for entry in entries]
        for (of_events, line, at), data in raws:
            if of_events is is_event:
                line %= len(lines)
                at %= len(lines[line]) + 1
                lines[line] = lines[line][:at] + data + lines[line][at + len(data) :]
        (folder / file).write_bytes(b"\n".join([*lines, b""]))


COMMANDS = [
    ("report",),
    ("report", "--json"),
    ("report", "--column", "loss", "--sort", "loss"),
    ("watch", "--once"),
    ("plot", "-o", "page.html"),
]


@given(st.integers(0, 1), st.lists(FIELDS, max_size=4), st.lists(RAW, max_size=2))
@example(0, [((False, 0, 2), 10**400, None)], [])
@example(0, [((False, 0, 0), 10**400, None)], [])
@example(0, [((False, 0, 2), 1.0, "\ud800")], [])
@example(0, [((False, 0, 2), 1.0, "a\x1b[2J")], [])
def test_commands_read_any_log_without_a_traceback(tmp_path_factory, which, fields, raws):
    folder = tmp_path_factory.mktemp("runs")
    write_damaged(folder / "a", which, fields, raws)
    for name, *options in COMMANDS:
        done = command(folder, name, "a", *options)
        assert done.exit_code in (0, 1)
        if done.exit_code:
            assert re.fullmatch(r"Error: .+\n", done.stderr)
        printed = done.stdout + done.stderr
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\ud800-\udfff]", printed)
