"""The command `estimate`: print estimates of the memory that a training step takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

import accel_fn
from accel_fn.cli.output import (
    SHELL_FILE,
    at_work,
    interruptible,
    json_option,
    mesh_option,
    one_line_errors,
    print_json,
    print_table,
    readable_bytes,
)
from accel_fn.cli.targets import call_target, load_target, read_target
from accel_fn.extend import parse_mesh

if TYPE_CHECKING:
    from accel_fn.contrib.estimate.memory import MemoryEstimate

_PARTS = ("parameters", "buffers", "gradients", "optimizer", "batch", "activations", "peak")
_SHARDS: dict[str, Callable[[], Any]] = {
    "fsdp": lambda: accel_fn.wrap_fsdp(),
    "tp": lambda: accel_fn.wrap_tp(),
    "zero1": lambda: accel_fn.wrap_deepspeed(stage=1),
    "zero2": lambda: accel_fn.wrap_deepspeed(stage=2),
    "zero3": lambda: accel_fn.wrap_deepspeed(stage=3),
}
# A terminal of 80 columns has room for four estimates side by side.
_COLUMNS = 4


def _counts(context: click.Context, option: click.Parameter, value: str) -> tuple[int, ...]:
    """Parse integers >= 1 that commas separate, such as `1,8,64`."""
    parts = value.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise click.BadParameter(f"{value!r} is not an integer >= 1, or several such as 1,8,64")
    return tuple(map(int, parts))


def _count_option(*names: str, text: str) -> Callable[[Any], Any]:
    return click.option(
        *names, callback=_counts, metavar="N,...", default="1", show_default=True, help=text
    )


@click.command()
@click.argument("target", type=SHELL_FILE)
@click.option("--batch", metavar="TARGET", help="A function that returns the global batch.")
@click.option("--loss", metavar="TARGET", help="The loss function, (model, batch) -> loss.")
@click.option("--optimizer", help="A name in torch.optim.  [default: the plan's, else AdamW]")
@click.option(
    "--precision",
    type=click.Choice(["no", "fp16", "bf16"]),
    default="no",
    show_default=True,
    help="Of with_amp.",
)
@_count_option("-n", "--num-processes", text="Ranks that share the batch.")
@_count_option("--num-microbatches", text="Micro-batches of a rank's part of the batch.")
@mesh_option("Axes that the ranks form, such as dp=-1,tp=2: those along dp share the batch.")
@click.option(
    "--shard",
    type=click.Choice([*_SHARDS]),
    multiple=True,
    help="How ranks share a model; tp by its own plan.  [default: the plan's]",
)
@click.option("--device", help="The device whose kernels run.  [default: this machine's]")
@json_option("Print JSON, in bytes.")
def estimate(
    *,
    target: str,
    batch: str | None,
    loss: str | None,
    num_processes: tuple[int, ...],
    num_microbatches: tuple[int, ...],
    mesh: str | None,
    shard: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Print the memory that one training step takes on a rank, without using it.

    TARGET is FILE.py:NAME or MODULE:NAME, and names a function without arguments that gives a model, a
    model and a batch, a plan, or a plan and a state. Of a plan, the model, the loss, the optimizers and
    the frozen models count, and the transforms that divide the model among ranks. The function runs where
    tensors have shapes and no data, so a model may be larger than this machine. With a batch, the step is
    gone through to count what is alive in it.
    """
    from accel_fn.contrib.estimate.memory import estimates

    found: list[MemoryEstimate] = []
    total = len(num_processes) * len(num_microbatches)
    with interruptible(), one_line_errors(), at_work(f"estimating, 0 of {total} done") as show:
        for each in estimates(
            lambda: read_target(target, "estimate"),
            make_batch=None if batch is None else _maker(batch, "batch"),
            loss_fn=None if loss is None else load_target(loss, "estimate", "loss"),
            world_sizes=num_processes,
            num_microbatches=num_microbatches,
            mesh=parse_mesh("estimate", "mesh", mesh) if mesh else None,
            shard=accel_fn.compose(*[_SHARDS[each]() for each in shard]) if shard else None,
            **options,
        ):
            found.append(each)
            show(f"estimating, {len(found)} of {total} done")
    if as_json:
        print_json([asdict(each) for each in found])
    else:
        for start in range(0, len(found), _COLUMNS):
            columns = map(_column, found[start : start + _COLUMNS])
            heading, *rows = zip(("ranks", "micro-batches", *_PARTS), *columns, strict=True)
            print_table(heading, rows)


def _maker(target: str, parameter: str) -> Callable[[], Any]:
    found = load_target(target, "estimate", parameter)
    return lambda: call_target(found, target, "estimate", parameter)


def _column(found: MemoryEstimate) -> list[str]:
    sizes = [readable_bytes(getattr(found, part)) for part in _PARTS]
    return [str(found.world_size), str(found.num_microbatches), *sizes]
