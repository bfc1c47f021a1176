"""The command `estimate`: the memory of a training step."""

from __future__ import annotations

import importlib
from typing import Any

import click

from accel_fn.cli.output import FILE_FOR_SHELLS, interrupts_raised


def _counts(context: click.Context, option: click.Parameter, value: str) -> tuple[int, ...]:
    """One integer >= 1 or several, as in `1,8,64`."""
    parts = value.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise click.BadParameter(f"{value!r} is not an integer >= 1, or several such as 1,8,64")
    return tuple(map(int, parts))


@click.command()
@click.argument("target", type=FILE_FOR_SHELLS)
@click.option("--batch", metavar="TARGET", help="What gives the global batch.")
@click.option("--loss", metavar="TARGET", help="The loss function, (model, batch) -> loss.")
@click.option("--optimizer", default="AdamW", show_default=True, help="A name in torch.optim.")
@click.option(
    "--precision",
    type=click.Choice(["no", "fp16", "bf16"]),
    default="no",
    show_default=True,
    help="Of with_amp.",
)
@click.option(
    "-n",
    "--num-processes",
    callback=_counts,
    metavar="N,...",
    default="1",
    show_default=True,
    help="Ranks that share the batch.",
)
@click.option(
    "--num-microbatches",
    callback=_counts,
    metavar="N,...",
    default="1",
    show_default=True,
    help="Parts of a rank's share.",
)
@click.option("--device", help="Whose kernels.  [default: this machine's]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in bytes.")
def estimate(**options: Any) -> None:
    """Print how much memory one training step takes on a rank, without taking it.

    TARGET is FILE.py:NAME or MODULE:NAME, and names a function without arguments that gives a model,
    or a model and a batch. It runs where tensors have shapes and no data, so a model may be larger than
    this machine. With a batch, the step is gone through to count what is alive in it.
    """
    estimating = importlib.import_module("accel_fn.cli.estimating")
    with interrupts_raised():
        estimating.estimate_target(**options)
