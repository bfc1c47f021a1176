"""The command `plot`: draw the curves of runs as a picture and as a page."""

from __future__ import annotations

import os
from pathlib import Path

import click

from accel_fn.cli.output import interruptible, one_line_errors, runs_argument
from accel_fn.contrib.runs.plot_page import write_page
from accel_fn.contrib.runs.plot_png import write_png
from accel_fn.contrib.runs.run_log import read_runs
from accel_fn.errors import ArgumentError

_WRITERS = {".png": write_png, ".html": write_page}


@click.command(epilog="Example: accel-fn plot runs/a runs/b -o compared.png")
@runs_argument()
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="A file .png or .html, or a name for both.  [default: plot, in the folder of the runs]",
)
def plot(*, paths: tuple[Path, ...], out: Path | None) -> None:
    """Draw the curves of runs: a PNG, and a page that a browser opens without a network.

    RUN is a folder with a log that af.log_to wrote, or the log itself. Runs share each chart: losses,
    metrics, learning rates, gradient norm, speed and memory by step. Restarts and skipped updates are
    marked.
    """
    with interruptible(), one_line_errors():
        runs, without = read_runs("plot", paths)
        drawn = [run for run in runs if run.columns]
        if not drawn:
            raise ArgumentError(
                f"plot: no value in {', '.join(map(str, paths))} yet; wait for a line"
            )
        out = _folder(paths) / "plot" if out is None else out
        files = (
            [out]
            if out.suffix in _WRITERS
            else [out.with_name(out.name + each) for each in _WRITERS]
        )
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            for file in files:
                _WRITERS[file.suffix](drawn, file)
                print(f"written to {file}")
        except OSError as error:
            raise ArgumentError(
                f"plot: {error.filename} cannot be written: {error.strerror}"
            ) from None
    for path in [*without, *(run.name for run in runs if not run.columns)]:
        click.echo(f"plot: no value in {path}", err=True)


def _folder(paths: tuple[Path, ...]) -> Path:
    """Return the innermost folder that holds all runs."""
    return Path(os.path.commonpath([path if path.is_dir() else path.parent for path in paths]))
