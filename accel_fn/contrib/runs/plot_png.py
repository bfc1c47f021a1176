"""Draw the curves of runs as a picture, by matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fn.contrib.runs.charts import COLORS, Chart, Curve, Marks, arrange, marks, thinned
from accel_fn.contrib.runs.run_log import Run
from accel_fn.errors import ExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 2000
_COLUMNS = 3


def write_png(runs: Sequence[Run], path: Path) -> None:
    """Write a picture of the charts of runs."""
    draw_figure(runs).savefig(path, format="png", dpi=130)


def draw_figure(runs: Sequence[Run]) -> Figure:
    """Draw the charts of runs side by side, with restarts and skipped updates marked."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ModuleNotFoundError as error:
        raise ExtraError(
            "plot: matplotlib must be installed to write a PNG; in a clone of accel_fn: "
            'pip install ".[runs]"; or write the page alone: -o plot.html',
            name=error.name,
        ) from None
    charts = arrange(runs)
    columns = min(len(charts), _COLUMNS)
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(4.8 * columns, 2.8 * rows + 0.6), layout="constrained")
    marked = [marks(run) for run in runs]
    places = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
    for chart, axes in itertools.zip_longest(charts, places):
        if chart is None:
            axes.axis("off")
        else:
            _draw(chart, axes, marked)
    handles = [
        Line2D([], [], color=COLORS[place % len(COLORS)], label=run.name)
        for place, run in enumerate(runs)
    ]
    if any(each.restarts for each in marked):
        handles.append(Line2D([], [], color="0.4", linestyle=":", label="restart"))
    if any(each.skipped for each in marked):
        handles.append(
            Line2D([], [], color="0.4", linestyle="", marker="|", label="skipped update")
        )
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    return figure


def _draw(chart: Chart, axes: Axes, marked: Sequence[Marks]) -> None:
    for curve in chart.curves:
        steps, values = thinned(curve.column, _POINTS)
        # Mark the points of a short curve: it shows evaluations, or its run has just begun.
        look = {"color": curve.color, "marker": "." if len(steps) < 30 else "", **_dashes(curve)}
        axes.plot(steps, values, linewidth=curve.width, **look)
    bottom = axes.get_xaxis_transform()
    for place in sorted({curve.run for curve in chart.curves}):
        look = {"color": COLORS[place % len(COLORS)]}
        for step in marked[place].restarts:
            axes.axvline(step, linestyle=":", linewidth=1, **look)
        skipped = marked[place].skipped
        axes.plot(skipped, [0.02] * len(skipped), "|", transform=bottom, **look)
    if len(chart.names) > 1:
        for name, curve in chart.names.items():
            color = curve.color if len(marked) == 1 else "0.4"
            axes.plot([], [], color=color, label=name, **_dashes(curve))
        axes.legend(frameon=False, fontsize="small", handlelength=3)
    axes.set_title(chart.title, fontsize="medium")
    axes.set_xlabel("step", fontsize="small")
    axes.set_yscale("log" if chart.is_log else "linear")
    axes.tick_params(labelsize="small", labelbottom=True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _dashes(curve: Curve) -> dict[str, Any]:
    return {"dashes": [float(each) for each in curve.dash.split()]} if curve.dash else {}
