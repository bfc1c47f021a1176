"""`accel-fn watch`, called as a user would, in a pipe and in a terminal."""

from __future__ import annotations

import json
import re
import sys
import time

import pytest

from tests.cli.commands import command, surroundings
from tests.cli.terminal import Terminal
from tests.contrib.runs import histories


@pytest.fixture
def runs(tmp_path):
    for seed, name in enumerate("ab"):
        histories.with_values(seed, num_steps=60, kills=0).write(tmp_path / "runs" / name)
    return tmp_path


@pytest.mark.parametrize("options", [(), ("--once",)])
def test_a_pipe_gets_all_curves_once_in_80_columns(runs, options):
    done = command(runs, "watch", "runs/a", *options)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"runs/a: step 60, 6\d\d(\.\d)? samples/s, \d+ d \d+ h ago", lines[0])
    assert max(map(len, lines)) <= 80
    titles = [line.split()[0] for line in lines[1:] if line[:1].isalpha()]
    assert titles == ["loss", "learning_rate", "samples_per_second", "peak_memory"]
    assert "accuracy" in done.stdout
    assert "\x1b" not in done.stdout


def test_several_runs_share_the_charts(runs):
    done = command(runs, "watch", "runs/a", "runs/b")
    first, second, third = done.stdout.splitlines()[:3]
    assert first.startswith("runs/a: step 60")
    assert second.startswith("runs/b: step 60")
    assert third.split() == ["loss", "accuracy"]


def test_a_run_without_a_value_has_a_line_and_one_without_a_log_is_refused(runs):
    (runs / "log.events.jsonl").write_text('{"event": "start", "time": 1, "step": 0}\n')
    (runs / "log.jsonl").touch()
    done = command(runs, "watch", "log.jsonl")
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "log.jsonl: no value yet")
    done = command(runs, "watch", "runs")
    assert done.exit_code == 1
    assert done.stderr == "Error: watch: no log in runs; its folders have one: use runs/*\n"


def test_a_terminal_is_drawn_again_when_the_log_grows_and_left_clean_by_ctrl_c(runs):
    watch = [sys.executable, "-m", "accel_fn", "watch", "runs/a"]
    environment = surroundings(runs, TERM="xterm-256color", COLUMNS="80", LINES="24")
    with Terminal(watch, runs, environment) as screen:
        screen.read_until("\x1b[?1049h").read_until("step 60")
        with (runs / "runs/a/log.jsonl").open("a") as log:
            print(json.dumps({"step": 61, "time": time.time(), "loss": 0.12345}), file=log)
        screen.read_until("step 61").read_until("0.1235")
        began = time.monotonic()
        screen.type("\x03")
        assert screen.end() == 130
        assert time.monotonic() - began < 20
    assert screen.text.count("\x1b[?1049h") == screen.text.count("\x1b[?1049l") == 1
    *_, last = re.findall(r"\x1b\[\?25[hl]", screen.text)
    assert last == "\x1b[?25h"  # the cursor is back
    assert screen.text.endswith("accel-fn watch: stopped by Ctrl-C\n")
