"""The command `test`: the library's promises on this machine."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option(
    "-n",
    "--num-processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks.  [default: the accelerators here, else 2]",
)
@click.option("--cpu", is_flag=True, default=None, help="Use the CPU.")
@click.option("--config", "config_file", type=_FILE, metavar="FILE", help="Settings to start from.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def test(
    *, num_processes: int | None, cpu: bool | None, config_file: Path | None, as_json: bool
) -> None:
    """Check the library's promises on this machine, over real processes.

    Trains small models on all ranks and by a plain loop on one, shares out data, has ranks talk, and
    prints the largest difference that was found beside what rounding explains. The exit code is 0 if
    all promises hold. Settings are those of `accel-fn launch`.

    On several machines, start it there: `accel-fn launch ... -m accel_fn.cli test`, or srun.
    """
    testing = importlib.import_module("accel_fn.cli.selftest")
    testing.run_test(num_processes, cpu, config_file, as_json=as_json)
