"""The command `config`: write a file of settings, or show what is in force."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from accel_fn.cli.output import interrupts_raised

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option("--default", is_flag=True, help="Ask nothing: take what fits this machine.")
@click.option(
    "--output", type=_FILE, help="The file to write.  [default: accel_fn.yaml]", metavar="FILE"
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
@click.option("--show", is_flag=True, help="Print the settings in force, and who gave each.")
@click.option("--json", "as_json", is_flag=True, help="Show as JSON.")
@click.option("--config", "config_file", type=_FILE, help="The file to show.", metavar="FILE")
def config(
    *,
    default: bool,
    output: Path | None,
    force: bool,
    show: bool,
    as_json: bool,
    config_file: Path | None,
) -> None:
    """Write settings to a file, by questions; or show those in force.

    The file is accel_fn.yaml in this folder, which `accel-fn launch` finds from here and from
    any folder below. `--show` reads what launch would read: variables ACCEL_FN_*, the nearest
    accel_fn.yaml or [tool.accel_fn] in pyproject.toml, and config.yaml in ~/.config/accel_fn.
    With --config it reads that file instead of the nearest one, also one that accelerate wrote.
    """
    if show:
        _refuse("--show", {"--default": default, "--output": output, "--force": force})
        importlib.import_module("accel_fn.cli.show").show(config_file, as_json=as_json)
    else:
        _refuse("writing a file", {"--json": as_json, "--config": config_file})
        questions = importlib.import_module("accel_fn.cli.questions")
        with interrupts_raised():
            questions.write(output, ask=not default, force=force)


def _refuse(job: str, options: dict[str, object]) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise click.UsageError(f"{', '.join(given)} cannot be combined with {job}")
