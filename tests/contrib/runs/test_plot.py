"""`accel-fn plot`: the pictures and pages that it writes, and where."""

from __future__ import annotations

import pytest

from tests.cli.commands import command
from tests.contrib.runs import histories


@pytest.fixture
def runs(tmp_path):
    for seed, name in enumerate("ab"):
        histories.with_values(seed, num_steps=60).write(tmp_path / "runs" / name)
    return tmp_path


def test_a_run_gets_its_picture_and_page_in_its_folder(runs):
    done = command(runs, "plot", "runs/a")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == "written to runs/a/plot.png\nwritten to runs/a/plot.html\n"
    assert (runs / "runs/a/plot.png").read_bytes().startswith(b"\x89PNG")
    assert (runs / "runs/a/plot.html").read_text().startswith("<!doctype html>")


def test_several_runs_get_theirs_in_the_folder_that_they_share(runs):
    done = command(runs, "plot", "runs/a/log.jsonl", "runs/b")
    assert done.stdout == "written to runs/plot.png\nwritten to runs/plot.html\n"
    # runs/* then has these files beside the runs.
    done = command(runs, "plot", *(runs / "runs").iterdir(), "-o", "plot.html")
    assert (done.exit_code, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("out", "written"),
    [
        ("x.html", ["x.html"]),
        pytest.param("new/x.png", ["new/x.png"], marks=pytest.mark.slow),
        pytest.param("x.y", ["x.y.png", "x.y.html"], marks=pytest.mark.slow),
    ],
)
def test_the_ending_of_the_output_chooses_what_is_written(runs, out, written):
    done = command(runs, "plot", "runs/a", "-o", out)
    assert done.stdout == "".join(f"written to {each}\n" for each in written)
    assert all((runs / each).exists() for each in written)


def test_a_run_without_values_is_named_and_one_alone_is_refused(runs):
    empty = runs / "runs" / "empty"
    empty.mkdir()
    (empty / "log.events.jsonl").write_text('{"event": "start", "time": 1, "step": 0}\n')
    (empty / "log.jsonl").touch()
    done = command(runs, "plot", "runs/a", "runs/empty", "-o", "x.html")
    assert (done.exit_code, done.stderr) == (0, "plot: no value in runs/empty\n")
    done = command(runs, "plot", "runs/empty")
    assert done.exit_code == 1
    assert done.stderr == "Error: plot: no value in runs/empty yet; wait for a line\n"


def test_an_output_that_cannot_be_written_is_refused(runs):
    (runs / "file").touch()
    done = command(runs, "plot", "runs/a", "-o", "file/plot.html")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "Error: plot: file cannot be written: File exists\n"
