"""The command `explain`: one step of a plan, phase by phase."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from accel_fn.cli.output import FILE_FOR_SHELLS, interrupts_raised

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("target", type=FILE_FOR_SHELLS)
@click.option(
    "-n",
    "--num-processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks of the step.  [default: the launch's]",
)
@click.option("--device", help="Device of the ranks.  [default: this machine's]")
@click.option("--config", "config_file", type=_FILE, metavar="FILE", help="Settings to start from.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(
    *,
    target: str,
    num_processes: int | None,
    device: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Print what one step of a plan does, phase by phase. Nothing is built or run.

    TARGET is FILE.py:NAME or MODULE:NAME, and names a Plan, or a function without arguments that
    gives one. What it leaves to the launch, the settings say: `accel-fn config --show`.
    """
    explaining = importlib.import_module("accel_fn.cli.explaining")
    with interrupts_raised():
        explaining.explain_target(target, num_processes, device, config_file, as_json=as_json)
