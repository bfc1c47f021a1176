"""Where the wall time of a run went, against histories that know it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_fn.contrib.runs.goodput import CATEGORIES, goodput
from accel_fn.contrib.runs.run_log import Column, Run, read_runs
from tests.contrib.runs import histories

ROUNDING = 50
"""Microseconds: the time of an entry is a float of unix seconds."""


def found_in(history):
    with tempfile.TemporaryDirectory() as folder:
        [run], _ = read_runs("report", [history.write(Path(folder))])
    return goodput(run)


@given(histories.processes(*histories.OPERATIONS, histories.ROLLBACK))
def test_every_moment_of_a_run_goes_into_its_category(processes):
    history = histories.play(processes, every=1)
    found, truth = found_in(history), history.truth()
    assert list(found.microseconds) == list(CATEGORIES)
    assert found.wall == sum(truth.values())
    assert found.paused == history.paused
    assert found.wall + found.paused == 1000 * (history.last_entry - histories.EPOCH)
    assert found.microseconds == {
        each: pytest.approx(truth[each], abs=ROUNDING) for each in CATEGORIES
    }
    assert found.processes == len(processes)


@given(histories.processes(*histories.OPERATIONS), st.integers(2, 5))
def test_what_events_show_does_not_depend_on_how_often_values_are_logged(processes, every):
    history = histories.play(processes, every)
    whole, truth = found_in(history), history.truth()
    found = whole.microseconds
    assert whole.wall + whole.paused == 1000 * (history.last_entry - histories.EPOCH)
    assert min(found.values()) >= 0
    shown = set(CATEGORIES) - {"updates", "data", "other"}
    assert {each: found[each] for each in shown} == {
        each: pytest.approx(truth[each], abs=ROUNDING) for each in shown
    }


EVENTS = st.fixed_dictionaries(
    {
        "event": st.sampled_from(["start", "first_step", "load", "save", "evaluate", "end", "x"]),
        "time": st.floats(0, 1000),
        "step": st.integers(0, 30),
    },
    optional={
        "seconds": st.floats(-10, 1000) | st.just(float("nan")),
        "process_began": st.floats(0, 1000) | st.none(),
        "lost_step": st.integers(0, 30) | st.none(),
        "lost_time": st.floats(0, 1000) | st.none(),
    },
)


@given(
    st.lists(EVENTS, max_size=12),
    st.lists(st.tuples(st.floats(0, 1000), st.floats(), st.floats()), max_size=12),
)
def test_parts_sum_to_the_wall_time_whatever_the_log_holds(events, lines):
    steps = [*range(len(lines))]
    names = ("time", "data_wait", "skipped_updates")
    columns = {
        name: Column(steps, list(values))
        for name, values in zip(names, zip(*lines, strict=True), strict=False)
    }
    found = goodput(Run("runs/a", columns, events))
    times = [event["time"] for event in events] + [line[0] for line in lines]
    assert min(found.microseconds.values()) >= 0
    length = round((max(times, default=0) - min(times, default=0)) * 1e6)
    assert found.wall + found.paused >= length - 1


def test_a_log_without_events_shows_updates_and_waits_for_data():
    columns = {
        "time": Column([1, 2, 3], [10.0, 12.0, 14.0]),
        "data_wait": Column([2, 3], [0.5, 0.0]),
    }
    found = goodput(Run("runs/a", columns, []))
    assert {name: spent for name, spent in found.microseconds.items() if spent} == {
        "updates": 3_000_000,
        "data": 1_000_000,
    }
    assert (found.processes, found.share) == (1, 0.75)


def test_an_empty_log_has_no_goodput():
    found = goodput(Run("runs/a", {}, []))
    assert (found.wall, found.processes) == (0, 0)
    assert found.share != found.share


def test_plans_of_one_process_begin_one_process():
    began = {"process_began": 1.0, "step": 1}
    events = [
        {"event": "start", "time": 3.0, **began},
        {"event": "first_step", "time": 5.0, "step": 1, "seconds": 2.0},
        {"event": "start", "time": 5.0, **began},
        {"event": "first_step", "time": 7.0, "step": 1, "seconds": 2.0},
    ]
    columns = {"time": Column([2, 3], [8.0, 9.0])}
    found = goodput(Run("runs/a", columns, events))
    assert found.processes == 1
    assert (found.microseconds["start"], found.microseconds["compile"]) == (2_000_000, 2_000_000)


def test_time_in_the_steps_of_another_plan_is_no_wait_for_data():
    waits = {"generator/data_wait": Column([2], [0.75]), "critic/data_wait": Column([2], [0.5])}
    found = goodput(Run("runs/a", {"time": Column([1, 2], [10.0, 14.0]), **waits}, []))
    assert (found.microseconds["data"], found.microseconds["updates"]) == (1_000_000, 3_000_000)
