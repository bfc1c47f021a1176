"""Write the curves of runs as one page that a browser opens without a network."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path

from accel_fn.contrib.runs.charts import COLORS, Chart, Curve, arrange, marks, thinned
from accel_fn.contrib.runs.run_log import Run

_POINTS = 1000


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Write the charts of runs to a page that shows the values at the pointer."""
    data = {
        "runs": [_run(place, run) for place, run in enumerate(runs)],
        "charts": [_chart(chart, len(runs)) for chart in arrange(runs)],
    }
    # Escape `<`, so that `</script>` in a name of the data does not end the script element.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    title = html.escape(", ".join(run.name for run in runs))
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    page = page.replace("TITLE", title, 1).replace("DATA", text, 1)
    path.write_text(page, encoding="utf-8")


def _run(place: int, run: Run) -> dict[str, object]:
    found = marks(run)
    look = {"name": run.name, "color": COLORS[place % len(COLORS)]}
    return {**look, "restarts": found.restarts, "skipped": found.skipped}


def _chart(chart: Chart, num_runs: int) -> dict[str, object]:
    names = [
        {"name": name, "color": curve.color if num_runs == 1 else None, "dash": curve.dash}
        for name, curve in chart.names.items()
    ]
    curves = [_curve(curve) for curve in chart.curves]
    return {"title": chart.title, "log": chart.is_log, "names": names, "curves": curves}


def _curve(curve: Curve) -> dict[str, object]:
    steps, values = thinned(curve.column, _POINTS)
    # Round to seven digits, so that the page is small. A screen shows fewer.
    rounded = [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]
    look = {
        "run": curve.run,
        "name": curve.name,
        "color": curve.color,
        "dash": curve.dash,
        "width": curve.width,
    }
    return {**look, "steps": steps, "values": rounded}
