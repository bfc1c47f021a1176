"""Estimating the memory of a model that is given by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from accel_fn.cli.output import errors_in_a_line, print_json, print_table
from accel_fn.launcher.targets import call_target, load_target
from accel_fn.observe.estimate_memory import MemoryEstimate, estimate_memory

_PARTS = ("parameters", "buffers", "gradients", "optimizer", "batch", "activations", "peak")


def estimate_target(
    target: str,
    batch: str | None,
    loss: str | None,
    optimizer: str,
    precision: str,
    num_processes: tuple[int, ...],
    num_microbatches: tuple[int, ...],
    device: str | None,
    *,
    as_json: bool,
) -> None:
    """Print the memory of a step of the model that `target` gives."""
    with errors_in_a_line():
        found = estimate_memory(
            _maker(target, "target"),
            make_batch=None if batch is None else _maker(batch, "batch"),
            loss_fn=None if loss is None else load_target(loss, "estimate", "loss"),
            optimizer=optimizer,
            precision=precision,
            world_sizes=num_processes,
            num_microbatches=num_microbatches,
            device=device,
        )
    if as_json:
        print_json([asdict(each) for each in found])
    else:
        print_table(["ranks", "micro-batches", *_PARTS], [_row(each) for each in found])


def _maker(target: str, parameter: str) -> Callable[[], Any]:
    found = load_target(target, "estimate", parameter)
    return lambda: call_target(found, target, "estimate", parameter)


def _row(found: MemoryEstimate) -> list[str]:
    sizes = [_shown(getattr(found, part)) for part in _PARTS]
    return [str(found.world_size), str(found.num_microbatches), *sizes]


def _shown(size: int | None) -> str:
    """Bytes as people read them; `-` for what was not measured."""
    if size is None:
        return "-"
    scaled, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if scaled < 1024:
            break
        scaled, unit = scaled / 1024, larger
    return f"{size} B" if unit == "B" else f"{scaled:.2f} {unit}"
