"""Writing weights out of a checkpoint, and saying so."""

from __future__ import annotations

from pathlib import Path

from accel_fn.checkpoint.weights.export import export_model
from accel_fn.checkpoint.weights.save_load_model import parse_size
from accel_fn.cli.output import errors_in_a_line


def export_to(checkpoint: Path, folder: Path, step: str, max_shard_size: str) -> None:
    """Export, and print what came of it."""
    with errors_in_a_line():
        count = export_model(checkpoint, folder, step, parse_size("export", max_shard_size))
    print(f"{count} tensors written to {folder}")
