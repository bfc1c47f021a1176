"""`accel-fn report`, called as a user would."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.cli.commands import command, surroundings
from tests.cli.terminal import Terminal
from tests.contrib.runs.histories import History

WAITS = {"a": 100, "b": 50, "c-with-a-longer-name": 0}


def one_run(wait, *, kills):
    """A run of 40 steps a process that saves at step 30 and is killed."""
    history = History(every=1)
    for _ in history.processes(kills):
        for _ in range(39):
            history.update(wait, skipped=history.step == 7)
            if history.step % 30 == 0:
                history.save(500)
    for entry in history.lines:
        step = entry["step"]
        entry |= {"loss": wait + 1 / step, "samples_per_second": 600.0, "peak_memory": 2**30}
        entry |= {"validation/loss": 2.0} if step % 30 == 0 else {}
    return history


@pytest.fixture
def runs(tmp_path):
    for number, (name, wait) in enumerate(WAITS.items()):
        one_run(wait, kills=number).write(tmp_path / "runs" / name)
    return tmp_path


def test_one_run_shows_where_its_time_went_and_its_values(runs):
    done = command(runs, "report", "runs/b")
    assert (done.exit_code, done.stderr) == (0, "")
    first, second, _, *rest = done.stdout.splitlines()
    assert first == "runs/b: 70 steps, 1 restart, 1 skipped update"
    assert re.fullmatch(
        r"goodput \d\d\.\d%: that share of 35\.2 s went into updates that count", second
    )
    parts, values = "\n".join(rest).split("\n\n")
    heading, *rows = parts.splitlines()
    assert heading.split() == ["time", "share", "length"]
    shares = [float(re.search(r"([\d.]+)%", row)[1]) for row in rows]
    assert sum(map(round, (10 * share for share in shares))) == 1000
    assert re.match(r"repeated +\d+\.\d%  2\.\d s +█* +steps lost and done again", rows[6])
    heading, *rows = values.splitlines()
    assert heading.split() == ["value", "last", "median", "lowest", "highest"]
    found = dict(row.split(maxsplit=1) for row in rows)
    assert found["loss"].split()[0] == "50.01"
    assert found["samples_per_second"].split() == ["600"] * 4
    assert found["peak_memory"].startswith("1.00 GiB")
    assert found["validation/loss"].split() == ["2"] * 4
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ((), "abc"),
        (("--sort", "loss"), "cba"),
        (("--sort", "loss", "--descending"), "abc"),
        (("--sort", "restarts", "--descending"), "cba"),
        (("--sort", "goodput"), "cba"),
        (("--sort", "validation/loss"), "bca"),  # a has none, and comes last
        (("--sort", "run", "--descending"), "cba"),
    ],
    ids=str,
)
def test_runs_are_compared_in_a_table_that_sorts_by_any_column(runs, options, order):
    paths = [f"runs/{name}" for name in WAITS]
    if "validation/loss" in options:
        log = runs / "runs" / "a" / "log.jsonl"
        log.write_text(re.sub(r', "validation/loss": 2.0', "", log.read_text()))
    done = command(runs, "report", *paths, *options)
    assert (done.exit_code, done.stderr) == (0, "")
    heading, *rows = done.stdout.splitlines()
    assert heading.split()[:3] == ["run", "step", "loss"]
    assert {*options[1:2]} <= {*heading.split()}
    assert [row.removeprefix("runs/")[0] for row in rows] == [*order]


def test_a_column_is_added_by_its_name(runs):
    done = command(runs, "report", "runs/b", "--column", "validation/loss")
    heading, row = done.stdout.splitlines()
    assert heading.split()[:4] == ["run", "step", "loss", "validation/loss"]
    assert row.split()[:4] == ["runs/b", "70", "50.01", "2"]


def test_json_has_the_seconds_of_each_category(runs):
    done = command(runs, "report", "runs/b", "--json")
    [found] = json.loads(done.stdout)
    assert found["run"] == "runs/b"
    assert (found["step"], found["restarts"], found["skipped_updates"]) == (70, 1, 1)
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_seconds"], abs=1e-9)
    assert found["goodput"] == pytest.approx(found["seconds"]["updates"] / found["wall_seconds"])
    assert found["last_values"]["validation/loss"] == 2.0


def test_a_terminal_of_80_columns_shows_every_heading_on_one_line(runs):
    paths = [f"runs/{name}" for name in WAITS]
    report = [sys.executable, "-m", "accel_fn", "report", *paths]
    environment = surroundings(runs, TERM="xterm-256color", COLUMNS="80")
    with Terminal(report, runs, environment) as screen:
        assert screen.end() == 0
        lines = re.sub(r"\x1b\[[0-9;]*m", "", screen.text).splitlines()
    assert max(map(len, lines)) <= 80
    headings = ["run", "step", "loss", "goodput", "time", "samples/s"]
    assert [line.split() for line in lines if "goodput" in line] == [headings]


def test_a_path_without_a_log_is_named_beside_the_others(runs):
    (runs / "runs" / "empty").mkdir()
    done = command(runs, "report", "runs/a", "runs/empty", "runs/b")
    assert (done.exit_code, done.stderr) == (0, "report: no log in runs/empty\n")
    assert len(done.stdout.splitlines()) == 3


def test_mistakes_are_one_line(runs):
    done = command(runs, "report", "runs")
    assert done.exit_code == 1
    assert done.stderr == "Error: report: no log in runs; its folders have one: use runs/*\n"
    done = command(runs, "report", "runs/a", "--sort", "los")
    rule = "must be a column of the table or a value that a run has logged"
    assert done.stderr == f"Error: report: sort {rule}, got 'los'; did you mean loss?\n"
    done = command(runs, "report", "runs/a", "--column", "xyz")
    assert f"report: column {rule}, got 'xyz'; use one of run, step, " in done.stderr
    done = command(runs, "report", "runs/a", "--descending")
    assert done.exit_code == 2
    assert "--descending needs --sort COLUMN" in done.stderr


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "1 min 0 s"),
        (59.4, "59.4 s"),
        (200, "3 min 20 s"),
        (3599.9, "1 h 0 min"),
        (7500, "2 h 5 min"),
        (86399, "1 d 0 h"),
        (100_000, "1 d 4 h"),
    ],
)
def test_a_length_of_time_has_two_units(tmp_path, seconds, text):
    lines = [{"step": step, "time": step * seconds, "loss": 1.0} for step in range(2)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, [*lines, {}])))
    done = command(tmp_path, "report", "log.jsonl")
    assert f": that share of {text} went into" in done.stdout
