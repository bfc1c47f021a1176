"""The commands `checkpoints` and `export`: list checkpoints, and write the weights of one."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from accel_fn.cli.output import (
    Cell,
    interruptible,
    json_option,
    one_line_errors,
    print_json,
    print_table,
    readable_bytes,
)
from accel_fn.core.mesh_axes import mesh_name

if TYPE_CHECKING:
    from accel_fn.checkpoint.store import Checkpoint


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@json_option()
def checkpoints(*, folder: Path, as_json: bool) -> None:
    """List the checkpoints of FOLDER, oldest first: step, age, size, ranks or mesh, whole or not, score.

    A checkpoint is whole if all its files exist and have the right sizes; their content is checked
    when it is loaded. The exit code is 1 if a checkpoint is not whole.
    """
    from accel_fn.checkpoint.store import list_checkpoints

    with one_line_errors():
        found = list_checkpoints(folder)
    if as_json:
        print_json([_as_dict(each) for each in found])
    elif found:
        now = datetime.now(UTC)
        headings = ["step", "age", "size", "ranks", "whole"]
        rows = [_row(each, now) for each in found]
        if any(each.score is not None for each in found):
            headings.append("score")
            rows = [[*row, _score(each)] for row, each in zip(rows, found, strict=True)]
        print_table(headings, rows)
    else:
        print(f"no checkpoint in {folder}")
    sys.exit(any(each.damage for each in found))


def _as_dict(found: Checkpoint) -> dict[str, object]:
    return {
        "path": str(found.path),
        "step": found.step,
        "saved_at": found.saved_at.isoformat(),
        "size": found.size,
        "world_size": found.world_size,
        "mesh": found.mesh,
        "score": found.score,
        "whole": not found.damage,
        "damage": found.damage,
    }


def _row(found: Checkpoint, now: datetime) -> list[str | Cell]:
    whole: Cell = (found.damage, "red") if found.damage else ("yes", "green")
    size = readable_bytes(found.size or None)
    ranks = mesh_name(found.mesh) if len(found.mesh) > 1 else str(found.world_size or "-")
    return [str(found.step), _age(now - found.saved_at), size, ranks, whole]


def _score(found: Checkpoint) -> str:
    return "-" if found.score is None else f"{found.score:.6g}"


def _age(age: timedelta) -> str:
    """Format an age as `3 days`, `2 h`, `5 min` or `12 s`."""
    seconds = max(int(age.total_seconds()), 0)
    for length, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--step", default="", help="The step of the model, if several were saved.")
@click.option(
    "--max-shard-size", default="5GB", show_default=True, help="Of a file, such as 512MiB."
)
def export(*, checkpoint: Path, folder: Path, step: str, max_shard_size: str) -> None:
    """Write the model of CHECKPOINT (.../step_00001200) to FOLDER, as safetensors files.

    The layout is Hugging Face's, as af.save_model writes it. The program that saved the checkpoint is
    not needed. Every file is checked against its hash first.
    """
    from accel_fn.checkpoint.save_weights import parse_size
    from accel_fn.checkpoint.weights import export_model

    with interruptible(), one_line_errors():
        count = export_model(checkpoint, folder, step, parse_size("export", max_shard_size))
    print(f"{count} tensors written to {folder}")
