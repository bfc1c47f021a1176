"""The command `export`: write the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from accel_fn.cli.output import interruptible, one_line_errors


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
    from accel_fn.checkpoint.weights import export_model, parse_size

    with interruptible(), one_line_errors():
        count = export_model(checkpoint, folder, step, parse_size("export", max_shard_size))
    print(f"{count} tensors written to {folder}")
