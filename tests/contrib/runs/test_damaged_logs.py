"""Logs that something has damaged: commands print lines instead of a traceback."""

import copy
import json
import math
import re
from random import Random

from hypothesis import example, given
from hypothesis import strategies as st

from tests.cli.commands import command
from tests.contrib.runs.histories import History

HOLE = b"\0" * 300
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
