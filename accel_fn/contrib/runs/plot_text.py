"""Draw the charts of runs as text; one character of braille shows eight dots of a curve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from rich.table import Table
from rich.text import Text

from accel_fn.contrib.runs.charts import COLORS, Chart, arrange, marks, thinned
from accel_fn.contrib.runs.run_log import Run

# The fewest columns and lines with which a chart can be read.
_NARROWEST, _LOWEST = 38, 9
# The number of columns for the numbers left of the vertical axis.
_LABEL = 9
_BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a character of braille, by row and column."""

_Point = tuple[float, float]
"""Column and line, counted in characters from the top left."""


class _Frame:
    """Maps the steps and values of a chart to positions in a grid of characters."""

    def __init__(self, chart: Chart, num_columns: int, num_lines: int) -> None:
        values = itertools.chain.from_iterable(curve.column.values for curve in chart.curves)
        finite = [*filter(math.isfinite, values)] or [0.0]
        self.num_columns, self.num_lines = num_columns, num_lines
        self.low, self.high = min(finite), max(finite)
        if self.low == self.high:
            extra = abs(self.low) / 10 or 1.0
            self.low, self.high = self.low - extra, self.high + extra
        self._warp: Callable[[float], float] = math.log if chart.is_log else float
        self._unwarp: Callable[[float], float] = math.exp if chart.is_log else float
        self.first = min(curve.column.steps[0] for curve in chart.curves)
        self.last = max(curve.column.steps[-1] for curve in chart.curves)

    @property
    def middle(self) -> float:
        return self._unwarp((self._warp(self.low) + self._warp(self.high)) / 2)

    def column(self, step: int) -> float:
        share = (step - self.first) / max(self.last - self.first, 1)
        return share * (self.num_columns - 0.5)

    def columns(self, steps: Sequence[int]) -> list[int]:
        return [int(self.column(step)) for step in steps if self.first <= step <= self.last]

    def point(self, step: int, value: float) -> _Point | None:
        """Return the point of a value; None if it is not finite."""
        if not math.isfinite(value):
            return None
        bottom, top = self._warp(self.low), self._warp(self.high)
        share = (top - self._warp(value)) / (top - bottom)
        return self.column(step), share * (self.num_lines - 0.25)


def draw_text(runs: Sequence[Run], width: int, height: int | None) -> Table:
    """Draw as many charts as a height has room for; without a height, draw all of them."""
    charts = arrange(runs)
    num_columns = max(min(width // _NARROWEST, len(charts)), 1)
    num_rows, lines = -(-len(charts) // num_columns), _LOWEST + 3
    if height is not None:
        num_rows = max(min(num_rows, height // _LOWEST), 1)
        lines = max(height // num_rows, _LOWEST)
    grid = Table.grid(*[""] * num_columns, padding=(0, 1))
    for start in range(0, num_rows * num_columns, num_columns):
        row = charts[start : start + num_columns]
        grid.add_row(*(_draw(chart, runs, width // num_columns - 1, lines) for chart in row))
    return grid


def _draw(chart: Chart, runs: Sequence[Run], width: int, lines: int) -> Text:
    """Draw a title, the curves with their axis, and the first and last step."""
    frame = _Frame(chart, width - _LABEL - 2, lines - 3)
    cells = _restarts(chart, frame, runs) | _curves(chart, frame)
    labels = {0: frame.high, frame.num_lines // 2: frame.middle, frame.num_lines - 1: frame.low}
    text = _title(chart, len(runs), width)
    for line in range(frame.num_lines):
        label = f"{_label(labels[line])} ┤" if line in labels else "│"
        text.append(f"\n{label:>{_LABEL + 2}}", "dim")
        for column in range(frame.num_columns):
            text.append(*cells.get((column, line), (" ", "")))
    shown = sorted({curve.run for curve in chart.curves})
    skipped = {column for place in shown for column in frame.columns(marks(runs[place]).skipped)}
    axis = "".join("x" if column in skipped else "─" for column in range(frame.num_columns))
    text.append(f"\n{'└':>{_LABEL + 2}}{axis}\n", "dim")
    steps = f"{frame.first}{frame.last:>{frame.num_columns - len(str(frame.first))}}"
    return text.append(" " * (_LABEL + 2) + steps, "dim")


def _label(value: float) -> str:
    text = f"{value:.4g}"
    return text if len(text) <= _LABEL else f"{value:.2g}"


def _title(chart: Chart, num_runs: int, width: int) -> Text:
    """Return the title of a chart: its kind of value, or for one run, each name with its last value."""
    names = [(curve.name, curve) for curve in chart.curves] if num_runs == 1 else []
    if len(names) <= 1:
        names = [(chart.title, curve) for _, curve in names]
    ends = [Text(f"{name} {curve.column.values[-1]:.4g}", curve.color) for name, curve in names]
    text = Text("  ").join(ends) if ends else Text(chart.title)
    text.stylize("bold")
    text.truncate(width, overflow="ellipsis")
    return text


_Cells = dict[tuple[int, int], tuple[str, str]]
"""A character and its style, by column and line."""


def _restarts(chart: Chart, frame: _Frame, runs: Sequence[Run]) -> _Cells:
    return {
        (column, line): ("┆", f"dim {COLORS[place % len(COLORS)]}")
        for place in {curve.run for curve in chart.curves}
        for column in frame.columns(marks(runs[place]).restarts)
        for line in range(frame.num_lines)
    }


def _curves(chart: Chart, frame: _Frame) -> _Cells:
    """Return the dots of all curves; where curves meet, the last one gives the color."""
    bits: dict[tuple[int, int], int] = {}
    colors: dict[tuple[int, int], str] = {}
    for curve in chart.curves:
        column = thinned(curve.column, 4 * frame.num_columns)
        points = [frame.point(step, value) for step, value in zip(*column, strict=True)]
        for across, down in _along(points):
            place = int(across), int(down)
            dot = _DOTS[int(4 * down) % 4][int(2 * across) % 2]
            bits[place] = bits.get(place, 0) | dot
            colors[place] = curve.color
    return {place: (chr(_BLANK + bits[place]), colors[place]) for place in bits}


def _along(points: Sequence[_Point | None]) -> Iterator[_Point]:
    """Yield the dots of the lines between points; a gap has no line."""
    for before, after in itertools.pairwise([None, *points]):
        if after is None:
            continue
        across, down = before or after
        num_dots = math.ceil(max(2 * abs(after[0] - across), 4 * abs(after[1] - down), 1))
        for dot in range(num_dots + 1):
            part = dot / num_dots
            yield across + part * (after[0] - across), down + part * (after[1] - down)
