"""Charts of runs, as a picture and as a page."""

from __future__ import annotations

import json
import math
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from accel_fn.contrib.runs.charts import Marks, arrange, marks, thinned
from accel_fn.contrib.runs.plot_page import write_page
from accel_fn.contrib.runs.plot_png import draw_figure, write_png
from accel_fn.contrib.runs.run_log import Column, Run, read_runs
from tests.contrib.runs import histories


def run_of(name="runs/a", events=(), **values):
    return Run(
        name, {key: Column([*range(len(each))], each) for key, each in values.items()}, [*events]
    )


@pytest.fixture
def runs(tmp_path):
    for seed, name in enumerate("ab"):
        histories.with_values(seed, kills=seed).write(tmp_path / name)
    return read_runs("plot", [tmp_path / "a", tmp_path / "b"])[0]


def test_values_of_one_kind_share_a_chart_and_losses_come_first():
    names = ["time", "learning_rate/0", "f1", "validation/accuracy", "accuracy"]
    names += ["generator/learning_rate/d/1", "skipped_updates", "loss/term", "validation/loss"]
    names += ["generator/loss", "loss", "generator/data_wait", "generator/skipped_updates"]
    names += ["peak_memory", "validation/time"]
    charts = arrange([run_of(**{name: [1.0] for name in names})])
    assert [(chart.title, [*chart.names]) for chart in charts] == [
        ("loss", ["loss/term", "validation/loss", "generator/loss", "loss"]),
        ("f1", ["f1"]),
        ("accuracy", ["validation/accuracy", "accuracy"]),
        ("time", ["validation/time"]),
        ("learning_rate", ["learning_rate/0", "generator/learning_rate/d/1"]),
        ("data_wait", ["generator/data_wait"]),
        ("peak_memory (GiB)", ["peak_memory"]),
    ]


def test_names_of_one_run_differ_by_color_and_those_of_several_by_dashes():
    values = {"loss": [1.0], "loss/term": [1.0]}
    [alone] = arrange([run_of(**values)])
    assert len({curve.color for curve in alone.curves}) == 2
    assert {curve.dash for curve in alone.curves} == {""}
    [both] = arrange([run_of(**values), run_of("runs/b", **values)])
    assert len({(curve.run, curve.color) for curve in both.curves}) == 2
    assert len({(curve.name, curve.dash) for curve in both.curves}) == 2


@pytest.mark.parametrize(
    ("values", "is_log"),
    [([1.0, 0.02], False), ([1.0, 0.005], True), ([1.0, 0.0], False), ([math.nan], False)],
)
def test_a_loss_that_falls_far_has_a_logarithmic_axis(values, is_log):
    [chart] = arrange([run_of(loss=values)])
    assert chart.is_log == is_log


def test_restarts_and_skipped_updates_are_marked_but_not_a_first_load():
    events = [
        {"event": "load", "time": 1.0, "step": 7},
        {"event": "start", "time": 2.0, "step": 8},
        {"event": "load", "time": 3.0, "step": 9},
    ]
    run = run_of(events=events, **{"d/skipped_updates": [0, 2, 0], "g/skipped_updates": [1, 1, 0]})
    assert marks(run) == Marks([9], [0, 1])


@given(
    st.lists(st.floats(-10, 10) | st.just(math.nan), min_size=1, max_size=300), st.integers(2, 50)
)
def test_a_thinned_curve_keeps_its_ends_and_extremes_and_gaps(values, most):
    column = Column([*range(len(values))], values)
    found = thinned(column, most)
    assert found.steps == sorted(set(found.steps))
    assert [values[step] for step in found.steps] == pytest.approx(found.values, nan_ok=True)
    assert (found.steps[0], found.steps[-1]) == (0, len(values) - 1)
    finite = [each for each in values if math.isfinite(each)]
    kept = [each for each in found.values if math.isfinite(each)]
    assert (min(kept, default=0), max(kept, default=0)) == (
        min(finite, default=0),
        max(finite, default=0),
    )
    assert len(kept) < len(found.values) or len(finite) == len(values)
    assert len(found.steps) <= 1.5 * most + 5


def test_a_thinned_curve_keeps_a_single_gap():
    values = [1.0] * 50 + [math.nan] + [1.0] * 49
    assert 50 in thinned(Column([*range(100)], values), 10).steps


def test_memory_is_shown_in_gib():
    [chart] = arrange([run_of(peak_memory=[2.0**30, 2.0**31])])
    assert chart.curves[0].column.values == [1.0, 2.0]


def test_a_later_run_is_thinner_so_that_equal_curves_show():
    [chart] = arrange([run_of(loss=[1.0]), run_of("runs/b", loss=[1.0])])
    first, second = (curve.width for curve in chart.curves)
    assert first > second


def test_the_picture_has_every_curve_and_mark(runs):
    figure = draw_figure(runs)
    titles = [axes.get_title() for axes in figure.axes if axes.axison]
    assert titles == [chart.title for chart in arrange(runs)]
    loss = figure.axes[0]
    assert loss.get_yscale() == "log"
    drawn = [[*map(float, line.get_ydata())] for line in loss.lines]
    for run in runs:
        for name in ("loss", "loss/entropy", "validation/loss"):
            assert run.columns[name].values in drawn
    [restart] = marks(runs[1]).restarts
    assert [restart, restart] in [[*line.get_xdata()] for line in loss.lines]
    assert marks(runs[0]).skipped in [[*line.get_xdata()] for line in loss.lines]
    [legend] = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [runs[0].name, runs[1].name, "restart", "skipped update"]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == [*arrange(runs)[0].names]


def test_the_picture_is_a_png(runs, tmp_path):
    write_png(runs, tmp_path / "plot")
    with Image.open(tmp_path / "plot") as picture:
        assert picture.format == "PNG"
        assert picture.width > 1500


def test_a_picture_without_matplotlib_names_the_extra(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ModuleNotFoundError, match=r'^plot: matplotlib must be .*"\.\[runs\]".*-o plot\.html'
    ):
        write_png(runs, tmp_path / "plot.png")


def data_of(page):
    [text] = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text()
    )
    return json.loads(text)


def test_the_page_has_every_curve_and_mark_and_needs_no_network(runs, tmp_path):
    write_page(runs, tmp_path / "plot.html")
    data = data_of(tmp_path / "plot.html")
    assert [run["name"] for run in data["runs"]] == [run.name for run in runs]
    assert [run["restarts"] for run in data["runs"]] == [[], marks(runs[1]).restarts]
    assert [run["skipped"] for run in data["runs"]] == [marks(run).skipped for run in runs]
    assert [chart["title"] for chart in data["charts"]] == [chart.title for chart in arrange(runs)]
    for curve in data["charts"][0]["curves"]:
        column = runs[curve["run"]].columns[curve["name"]]
        assert curve["steps"] == column.steps
        assert curve["values"] == pytest.approx(column.values, rel=1e-6)
    text = (tmp_path / "plot.html").read_text()
    addresses = re.findall(r"\w+://[^\"'\s]+", text)
    assert set(addresses) == {"http://www.w3.org/2000/svg"}  # the name of SVG, which nobody opens
    assert not re.search(r"<link|src=|@import|url\(", text)


def test_values_that_are_not_finite_are_gaps_in_the_page(tmp_path):
    write_page([run_of(loss=[1.0, math.nan, math.inf, 0.5])], tmp_path / "plot.html")
    [chart] = data_of(tmp_path / "plot.html")["charts"]
    assert chart["curves"][0]["values"] == [1.0, None, None, 0.5]


def test_a_name_cannot_break_out_of_the_page(tmp_path):
    name = "</script><script>alert(1)</script>"
    write_page([run_of(name, **{name: [1.0]})], tmp_path / "plot.html")
    text = (tmp_path / "plot.html").read_text()
    assert "<script>alert" not in text
    assert data_of(tmp_path / "plot.html")["runs"][0]["name"] == name
