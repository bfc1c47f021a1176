"""The command `checkpoints`: what a folder of checkpoints holds."""

from __future__ import annotations

import importlib
from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def checkpoints(*, folder: Path, as_json: bool) -> None:
    """List the checkpoints of FOLDER, oldest first: step, age, size, ranks, whole or not.

    Whole is one whose files are all there with the right sizes; their content is checked when
    it is loaded. The exit code is 1 where one is not whole.
    """
    importlib.import_module("accel_fn.cli.checking").list_folder(folder, as_json=as_json)
