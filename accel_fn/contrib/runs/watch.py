"""The command `watch`: draw the curves of runs in a terminal while they train."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from accel_fn.cli.output import interruptible, one_line_errors, readable_seconds, runs_argument
from accel_fn.contrib.runs.charts import COLORS
from accel_fn.contrib.runs.run_log import Run, find_logs, read_runs

if TYPE_CHECKING:
    from rich.console import Console, Group

_LOOK_EVERY_S = 0.5


@click.command(epilog="Example: accel-fn watch runs/a")
@runs_argument()
@click.option("--once", is_flag=True, help="Print the curves once, as where there is no terminal.")
def watch(*, paths: tuple[Path, ...], once: bool) -> None:
    """Draw the curves of runs in the terminal, again whenever a log grows, until Ctrl-C.

    RUN is a folder with a log that af.log_to wrote, or the log itself. A dotted line is a restart, and
    x on the axis is a skipped update.
    """
    from rich.console import Console

    console = Console()
    with interruptible(), one_line_errors():
        if once or not sys.stdout.isatty():
            console.print(_drawn(read_runs("watch", paths)[0], console.width, None))
        else:
            _follow(paths, console)


def _follow(paths: Sequence[Path], console: Console) -> None:
    """Draw the runs, and draw them again whenever a log or the size of the terminal has changed."""
    from rich.live import Live

    before = None
    # Read the logs once before the screen is cleared, so that an error stays visible.
    runs, _ = read_runs("watch", paths)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            logs = [log.stat() for path in paths for log in find_logs(path)]
            now = [console.size, *((each.st_size, each.st_mtime_ns) for each in logs)]
            if now != before:
                runs, _ = read_runs("watch", paths)
                live.update(_drawn(runs, console.width, console.height), refresh=True)
                before = now
            # Reading a long log takes CPU time, which the run needs. So sleep five times as long.
            time.sleep(max(_LOOK_EVERY_S, 5 * (time.monotonic() - began)))


def _drawn(runs: Sequence[Run], width: int, height: int | None) -> Group:
    from rich.console import Group
    from rich.text import Text

    from accel_fn.contrib.runs.plot_text import draw_text

    heads = [Text(_head(run), no_wrap=True, overflow="ellipsis") for run in runs]
    if len(runs) > 1:
        for place, head in enumerate(heads):
            head.stylize(COLORS[place % len(COLORS)])
    return Group(*heads, draw_text(runs, width, None if height is None else height - len(heads)))


def _head(run: Run) -> str:
    """Return a line with the name of a run, its last step, its speed, and the age of its last values."""
    times = run.columns.get("time")
    if times is None:
        return f"{run.name}: no value yet"
    parts = [f"step {run.last_step}"]
    if speeds := run.of_plans("samples_per_second"):
        parts.append(f"{speeds[0].values[-1]:.4g} samples/s")
    age = readable_seconds(max(time.time() - times.values[-1], 0))
    return f"{run.name}: {', '.join(parts)}, {age} ago"
