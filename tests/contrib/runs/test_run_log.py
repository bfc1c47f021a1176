"""Reading a run's log, whole or damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from accel_fn.contrib.runs.run_log import Column, find_logs, read_runs


def write(path, *entries, end="\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, entries)) + end)
    return path


def line(step, **values):
    return {"step": step, "time": 10.0 + step, **values}


def read_one(path):
    [run], _ = read_runs("report", [path])
    return run


def test_values_are_columns_with_the_steps_that_have_them(tmp_path):
    write(tmp_path / "log.jsonl", line(1, loss=0.5), line(2, loss=0.25, **{"validation/loss": 1.0}))
    run = read_one(tmp_path)
    assert run.columns == {
        "time": Column([1, 2], [11.0, 12.0]),
        "loss": Column([1, 2], [0.5, 0.25]),
        "validation/loss": Column([2], [1.0]),
    }
    assert (run.name, run.last_step, run.events) == (str(tmp_path), 2, [])


def test_values_of_one_step_on_two_lines_are_one_entry_and_steps_rise(tmp_path):
    write(tmp_path / "log.jsonl", line(2, loss=0.25), line(1, loss=0.5), line(2, accuracy=0.9))
    run = read_one(tmp_path)
    assert run.columns["loss"] == Column([1, 2], [0.5, 0.25])
    assert run.columns["accuracy"] == Column([2], [0.9])


def test_values_that_are_not_finite_are_read(tmp_path):
    write(
        tmp_path / "log.jsonl", line(1, loss=math.nan), line(2, loss=None), line(3, loss=math.inf)
    )
    first, second, third = read_one(tmp_path).columns["loss"].values
    assert math.isnan(first)
    assert math.isnan(second)
    assert third == math.inf


@pytest.mark.parametrize(
    "damage",
    [
        '{"step": 3, "time": 13.0, "lo',
        '{"step": 3, "time": 13.0, "lo\n',
        '{"step": 3, "ti{"step": 4, "time": 14.0}\n',
        "[1, 2]\n",
        '{"time": 3.0}\n',
        '{"step": "three"}\n',
        '{"step": -1}\n',
        "[" * 100_000 + "\n",
        "\n",
        "\ufffd\x00\n",
    ],
    ids=lambda text: text[:20],
)
def test_lines_that_are_no_entries_are_left_out(tmp_path, damage):
    log = write(tmp_path / "log.jsonl", line(1, loss=0.5))
    write(tmp_path / "log.events.jsonl", {"event": "start", "time": 10.0, "step": 0})
    for file in (log, tmp_path / "log.events.jsonl"):
        file.write_bytes(file.read_bytes() + damage.encode())
    run = read_one(tmp_path)
    assert run.columns["loss"] == Column([1], [0.5])
    assert [event["event"] for event in run.events] == ["start"]


def test_events_without_a_time_and_a_step_are_left_out(tmp_path):
    write(tmp_path / "log.jsonl", line(1))
    kept = {"event": "of a newer version", "time": 1, "step": 0, "more": {"a": 1}}
    without = ({"event": "save", "time": 1.0}, {"event": "save", "step": 1}, {"time": 1, "step": 1})
    endless = {"event": "save", "time": math.inf, "step": 1}
    write(tmp_path / "log.events.jsonl", kept, *without, endless)
    assert read_one(tmp_path).events == [kept]


def test_a_csv_is_read_like_json_lines(tmp_path):
    text = "step,time,loss,validation/loss\n1,11.0,0.5,\n2,12.0,nan,1\n3,13.0,0.1,2"
    (tmp_path / "log.csv").write_text(text)
    run = read_one(tmp_path)
    assert run.columns["time"] == Column([1, 2], [11.0, 12.0])  # the third row may be cut
    assert run.columns["validation/loss"] == Column([2], [1])
    assert run.columns["loss"].values[0] == 0.5


def test_rows_of_a_csv_with_other_cells_than_its_heading_are_left_out(tmp_path):
    rows = ["step,time,loss", "1,11.0", "2,12.0,0.5", "3,13.0,0.5,9", "4,14.0," + "9" * 200_000, ""]
    (tmp_path / "log.csv").write_text("\n".join(rows))
    assert read_one(tmp_path).columns["loss"] == Column([2], [0.5])


def test_each_log_in_a_folder_is_a_run(tmp_path):
    for name in ("critic", "generator"):
        write(tmp_path / f"{name}.jsonl", line(1, loss=0.5))
        write(tmp_path / f"{name}.events.jsonl", {"event": "start", "time": 10.0, "step": 0})
    write(tmp_path / "samples.jsonl", {"text": "no log"})
    (tmp_path / "scores.csv").write_text("name,score\na,1\n")
    (tmp_path / "notes.txt").write_text("step\n1\n")
    write(tmp_path / "texts.jsonl", {"step": 1, "text": "a sample of step 1"})
    (tmp_path / "folder.jsonl").mkdir()
    runs, without = read_runs("report", [tmp_path])
    assert [run.name for run in runs] == [
        str(tmp_path / f"{n}.jsonl") for n in ("critic", "generator")
    ]
    assert without == []
    assert [len(run.events) for run in runs] == [1, 1]


def test_a_csv_and_a_jsonl_of_one_name_are_one_run(tmp_path):
    write(tmp_path / "log.jsonl", line(1, loss=0.5))
    (tmp_path / "log.csv").write_text("step,time,loss\n1,11.0,0.5\n")
    assert find_logs(tmp_path) == [tmp_path / "log.jsonl"]
    assert read_one(tmp_path).name == str(tmp_path)


def test_a_log_that_has_no_line_yet_is_found_by_its_events(tmp_path):
    (tmp_path / "log.jsonl").touch()
    (tmp_path / "other.jsonl").touch()
    write(tmp_path / "log.events.jsonl", {"event": "start", "time": 10.0, "step": 0})
    assert find_logs(tmp_path) == [tmp_path / "log.jsonl"]
    assert read_one(tmp_path).last_step == 0


def test_a_run_that_ends_before_its_first_line_has_the_step_of_its_end(tmp_path):
    (tmp_path / "log.jsonl").touch()
    write(tmp_path / "log.events.jsonl", {"event": "end", "time": 10.0, "step": 3})
    assert read_one(tmp_path).last_step == 3


def test_paths_of_which_none_has_a_log_are_refused(tmp_path):
    write(tmp_path / "samples.jsonl", {"text": "no log"})
    with pytest.raises(
        ValueError, match=r"^report: no log in .*; a log is \*\.jsonl or \*\.csv with a col"
    ):
        read_runs("report", [tmp_path, tmp_path / "samples.jsonl"])
    write(tmp_path / "a" / "log.jsonl", line(1))
    with pytest.raises(
        ValueError, match=rf"report: no log in {tmp_path}; its folders have one: use .*/\*"
    ):
        read_runs("report", [tmp_path])


def test_a_file_that_cannot_be_read_is_refused():
    with pytest.raises(
        ValueError, match=r"^report: /proc/self/mem cannot be read: Input/output error"
    ):
        read_runs("report", [Path("/proc/self/mem")])
