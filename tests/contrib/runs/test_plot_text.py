"""Curves in a terminal."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from accel_fn.contrib.runs.plot_text import draw_text
from accel_fn.contrib.runs.run_log import Column, Run


def run_of(*values, events=(), steps=None, **columns):
    columns = {"loss": [*values], **columns}
    steps = [*range(len(values))] if steps is None else steps
    return Run("runs/a", {name: Column(steps, each) for name, each in columns.items()}, [*events])


def lines_of(runs, width=40, height=None):
    console = Console(width=width, color_system=None)
    with console.capture() as printed:
        console.print(draw_text(runs, width, height))
    return printed.get().splitlines()


def plotted(lines):
    """The characters of the first chart, without title, axis and numbers."""
    return [line.split("┤")[-1].split("│")[-1].rstrip() for line in lines[1:-2]]


def test_a_line_from_corner_to_corner_is_drawn_from_corner_to_corner():
    lines = lines_of([run_of(1.0, 0.0)])
    assert lines[0].rstrip() == "loss 0"
    assert [line.split("┤")[0].strip() for line in lines if "┤" in line] == ["1", "0.5", "0"]
    assert lines[-1].split() == ["0", "1"]
    drawn = plotted(lines)
    assert drawn[0][0] != " "
    assert len(drawn[-1]) == len(lines[-2].split("└")[1].rstrip())
    starts = [len(line) - len(line.lstrip()) for line in drawn]
    assert starts == sorted(starts)
    assert len(set(starts)) == len(drawn)


def test_a_value_that_is_not_finite_is_a_gap():
    values = [0.0, 0.0, 0.0, math.nan, 0.0, 0.0, 0.0]
    [drawn] = {
        line for line in plotted(lines_of([run_of(*values, other=[0.0] * 7)])[:12]) if "⠒" in line
    }
    assert len(drawn.split()) == 2


def test_a_loss_that_is_never_finite_has_an_empty_chart():
    lines = lines_of([run_of(math.nan, math.nan)])
    assert lines[0].rstrip() == "loss nan"
    assert not any(plotted(lines))


def test_restarts_and_skipped_updates_are_marked():
    start, load = {"event": "start", "time": 1, "step": 0}, {"event": "load", "time": 2, "step": 2}
    run = run_of(1.0, 1.0, 1.0, 1.0, 1.0, events=[start, load], skipped_updates=[0, 0, 0, 0, 2])
    lines = lines_of([run])
    marked = {line.index("┆") for line in lines if "┆" in line}
    axis = next(line for line in lines if "└" in line).rstrip()
    assert len(marked) == 1
    assert axis.count("x") == 1
    assert axis.endswith("x")
    middle = axis.index("└") + 1 + (len(axis) - axis.index("└") - 1) / 2
    assert abs(marked.pop() - middle) <= 1


@given(
    st.lists(st.floats(allow_nan=True, width=32), min_size=1, max_size=40),
    st.integers(30, 200),
    st.none() | st.integers(5, 60),
)
def test_any_values_fit_the_width_and_the_height(values, width, height):
    lines = lines_of([run_of(*values), run_of(*values[:1])], width, height)
    assert all(len(line) <= width for line in lines)
    assert height is None or len(lines) <= max(height, 9)


@pytest.mark.parametrize(("width", "charts"), [(40, 1), (80, 2), (130, 3)])
def test_a_wide_terminal_has_charts_side_by_side(width, charts):
    run = run_of(1.0, 2.0, accuracy=[0.0, 1.0], learning_rate=[1.0, 1.0])
    assert lines_of([run], width)[1].count("┤") == charts


def test_a_low_terminal_shows_the_first_charts():
    run = run_of(1.0, 2.0, accuracy=[0.0, 1.0], learning_rate=[1.0, 1.0])
    lines = lines_of([run], 40, 20)
    assert len(lines) == 20
    assert [line.split()[0] for line in lines if line[0].isalpha()] == ["loss", "accuracy"]


def test_the_title_has_the_last_value_of_each_name_of_one_run():
    run = run_of(1.0, 0.5, **{"validation/loss": [2.0, 1.5]})
    assert lines_of([run])[0].rstrip() == "loss 0.5  validation/loss 1.5"
    assert lines_of([run, run])[0].rstrip() == "loss"


def test_a_run_without_values_has_no_chart():
    assert "".join(lines_of([Run("runs/a", {}, [])])).strip() == ""
