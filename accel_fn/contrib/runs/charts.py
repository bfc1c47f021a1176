"""Arrange the logged values of runs as charts of curves, and find the steps that charts mark."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from accel_fn.contrib.runs.run_log import Column, Run

COLORS = (
    "#3b7dd8",
    "#e06c2c",
    "#2a9d5c",
    "#b455c9",
    "#b88a00",
    "#d6456b",
    "#1296a8",
    "#80868f",
)
"""The colours of runs, repeated after the last one; all are visible on white and black."""

DASHES = ("", "6 3", "2 2", "8 3 2 3")
"""Dash patterns, in line widths, that distinguish names in a chart of several runs. They repeat
after the last pattern."""

_MEMORY = "peak_memory (GiB)"
_FIRST = ("loss",)
_LAST = (
    "learning_rate",
    "grad_norm",
    "samples_per_second",
    "items_per_second",
    "data_wait",
    _MEMORY,
    "loss_scale",
)
_KNOWN = (*_FIRST, *_LAST, "peak_memory")
# With more runs than this, all curves have one width: the first would be too thick.
_MOST_WIDE = 4
# If the highest loss is more than this many times the lowest, use a logarithmic axis: a linear one
# hides the end of a curve.
_LOG_FROM = 100


@dataclass(frozen=True)
class Curve:
    """The values of one name in one run, and the color, dashes and width of their line."""

    run: int
    """The index of the run among all runs."""

    name: str
    column: Column
    color: str
    dash: str
    width: float


@dataclass(frozen=True)
class Chart:
    """Curves that share their axes."""

    title: str
    curves: list[Curve]

    @property
    def names(self) -> dict[str, Curve]:
        """Return the first curve of each name."""
        found: dict[str, Curve] = {}
        for curve in self.curves:
            found.setdefault(curve.name, curve)
        return found

    @property
    def is_log(self) -> bool:
        """Return whether this chart shows a loss that is easier to read on a logarithmic axis."""
        finite = [
            value for curve in self.curves for value in curve.column.values if math.isfinite(value)
        ]
        is_positive = bool(finite) and min(finite) > 0
        return self.title == "loss" and is_positive and max(finite) > _LOG_FROM * min(finite)


@dataclass(frozen=True)
class Marks:
    """The steps of a run at which a process loaded a checkpoint, or updates were skipped."""

    restarts: list[int]
    skipped: list[int]


def arrange(runs: Sequence[Run]) -> list[Chart]:
    """Make a chart for each kind of value: the loss first, then metrics, then the names in `_LAST`."""
    names: dict[str, dict[str, None]] = {}
    for name in itertools.chain.from_iterable(run.columns for run in runs):
        if name != "time" and name.rpartition("/")[2] != "skipped_updates":
            names.setdefault(_title(name), {})[name] = None
    return [
        Chart(title, list(_curves(runs, [*names[title]]))) for title in sorted(names, key=_order)
    ]


def _curves(runs: Sequence[Run], names: list[str]) -> Iterator[Curve]:
    """Yield the curves of a chart. Several runs differ in color and names in dashes; else names in color."""
    for (run_place, run), (place, name) in itertools.product(enumerate(runs), enumerate(names)):
        if name in run.columns:
            column = run.columns[name]
            color, dash = (run_place, place) if len(runs) > 1 else (place, 0)
            # Draw a later run with a thinner line, so that an equal curve of an earlier run shows
            # below it.
            width = 1.3 + len(runs) - 1 - run_place if len(runs) <= _MOST_WIDE else 1.3
            look = (COLORS[color % len(COLORS)], DASHES[dash % len(DASHES)], width)
            yield Curve(
                run_place, name, _in_gib(column) if _title(name) == _MEMORY else column, *look
            )


def _in_gib(column: Column) -> Column:
    return Column(column.steps, [value / 2**30 for value in column.values])


def _title(name: str) -> str:
    """Return the kind of a value by its name: `loss` for `loss/term` and for `validation/loss`."""
    parts = name.split("/")
    title = next((part for part in parts if part in _KNOWN), parts[-1])
    return _MEMORY if title == "peak_memory" else title


def _order(title: str) -> int:
    order = (*_FIRST, "", *_LAST)
    return order.index(title if title in order else "")


def marks(run: Run) -> Marks:
    """Find the steps that charts mark. The load with which a run began is not a restart."""
    starts = [event["time"] for event in run.events if event["event"] == "start"]
    began = min(starts, default=math.inf)
    restarts = [
        event["step"] for event in run.events if event["event"] == "load" and event["time"] > began
    ]
    skipped = {
        step
        for column in run.of_plans("skipped_updates")
        for step, count in zip(*column, strict=True)
        if count > 0
    }
    return Marks(restarts, sorted(skipped))


def thinned(column: Column, most: int) -> Column:
    """Keep the lowest and highest value and one gap of each range, and the first and last value."""
    steps, values = column
    size = -(-2 * len(steps) // most)
    if size < 3:
        return column
    kept = {0, len(steps) - 1}
    for start in range(0, len(steps), size):
        places = range(start, min(start + size, len(steps)))
        # A value that is not finite is drawn as a gap in the curve. Keep one, so that it stays visible.
        gap = next((place for place in places if not math.isfinite(values[place])), None)
        finite = [place for place in places if math.isfinite(values[place])]
        by_value = sorted(finite, key=values.__getitem__)
        kept.update(by_value[:1], by_value[-1:], [] if gap is None else [gap])
    drawn = sorted(kept)
    return Column([steps[each] for each in drawn], [values[each] for each in drawn])
