"""The command `new`: write a training program to start from."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from accel_fn.cli.output import FILE


@click.command()
@click.argument("file", type=FILE)
def new(*, file: Path) -> None:
    """Write a training program to FILE, such as train.py, to start from.

    It has a model, a loss, a loader, checkpoints from which it resumes, and an evaluation. It runs as it
    is, on one process or several; put your own model and data in. A file that exists is left as it is.
    """
    program = Path(__file__).with_name("program.py").read_text(encoding="utf-8")
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(program.replace("train.py", file.name))
    except FileExistsError:
        raise click.ClickException(f"{file} exists; name another file") from None
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error.strerror}") from None
    click.echo(f"Wrote {file}.\nNext: accel-fn launch {shlex.quote(str(file))}")
