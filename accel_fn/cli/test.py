"""The command `test`: check the library's promises on this machine, over real processes."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from accel_fn.cli.output import (
    SHELL_FILE,
    config_option,
    interruptible,
    json_option,
    num_processes_option,
    one_line_errors,
    print_json,
    resolve_settings,
    wrapped,
)
from accel_fn.cli.targets import as_plan, call_target, load_target, read_target
from accel_fn.errors import NotEquivalentError
from accel_fn.launcher.hardware import detect
from accel_fn.parallel.clusters import read_task

if TYPE_CHECKING:
    from accel_fn.testing.promises import Verdict

_TIMEOUT_S = 60.0
_NUM_BATCHES = 3


@click.command()
@click.argument("target", type=SHELL_FILE, required=False)
@click.option("--batch", metavar="TARGET", help="A function that returns the global batch.")
@num_processes_option("Ranks.  [default: the accelerators here, else 2]")
@click.option("--cpu", is_flag=True, default=None, help="Use the CPU.")
@config_option()
@json_option()
def test(
    *,
    target: str | None,
    batch: str | None,
    num_processes: int | None,
    cpu: bool | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Check the library's promises with real processes on this machine, or check a plan of yours.

    Without a TARGET, the command trains small models on all ranks and in a plain loop on one rank,
    distributes data, and runs collectives. For each promise, it prints the largest difference, next
    to the difference that rounding explains. The exit code is 0 if all promises hold. Settings are
    those of `accel-fn launch`.

    With a TARGET, the command trains that plan in float64 on one simulated rank and on several, on
    the CPU, and compares parameters, losses and norms. TARGET is FILE.py:NAME or MODULE:NAME, and
    names a function without arguments. The function returns a plan (alone or with a state) or a
    model (alone or with a batch).

    To check several machines, start the command on each of them, by
    `accel-fn launch ... -m accel_fn test` or by srun.
    """
    with one_line_errors():
        if target is not None:
            _check_plan(target, batch, num_processes or 2, as_json=as_json)
            return
        if batch is not None:
            raise click.UsageError("--batch is for a TARGET")
        if "RANK" not in os.environ and read_task(os.environ) is None:
            holds = _check_new_world(num_processes, cpu, config_file, as_json=as_json)
        elif num_processes is not None or cpu or config_file is not None:
            raise click.UsageError(
                "-n, --cpu and --config are for ranks of its own, and this is a rank already"
            )
        else:
            holds = check_this_world(as_json=as_json)
    sys.exit(not holds)


def _check_plan(
    target: str, batch_target: str | None, num_processes: int, *, as_json: bool
) -> None:
    """Check that a user's plan trains on several ranks as on one; raise if it does not."""
    from accel_fn.core.batch import map_tensors
    from accel_fn.parallel.ddp import wrap_ddp
    from accel_fn.testing.equivalence import assert_equivalent

    found, batch = read_target(target, "test")
    if batch_target is not None:
        batch = call_target(
            load_target(batch_target, "test", "batch"), batch_target, "test", "batch"
        )
    if batch is None:
        raise click.UsageError("a plan is checked on a batch: give --batch FILE.py:NAME")
    plan = as_plan(found)
    # In float32, rounding would hide small errors.
    for model in (plan.model, *plan.frozen.values()):
        model.double()
    batch = map_tensors(lambda each: each.double() if each.is_floating_point() else each, batch)
    shared = plan if plan.strategy else wrap_ddp()(plan)
    try:
        assert_equivalent(shared, shared, [batch] * _NUM_BATCHES, world_sizes=(1, num_processes))
    except NotEquivalentError as error:
        raise click.ClickException(f"test: {target} on {num_processes} ranks: {error}") from None
    if as_json:
        print_json({"holds": True, "num_processes": num_processes, "target": target})
    else:
        click.echo(f"holds: {num_processes} ranks train {target} as one does")


def _check_new_world(
    num_processes: int | None, cpu: bool | None, config_file: Path | None, *, as_json: bool
) -> bool:
    """Start ranks with the settings of a launch; return whether all promises hold on them."""
    from accel_fn.launcher.launch import launch

    resolved = resolve_settings({"num_processes": num_processes, "cpu": cpu}, config_file)
    settings = resolved.settings
    if (settings.num_machines or 1) > 1:
        raise click.ClickException(
            f"test: num_machines must be 1 for processes of its own, got {settings.num_machines} "
            f"({resolved.sources['num_machines']}); start it on each machine: "
            "accel-fn launch -m accel_fn test"
        )
    # On the CPU, start two ranks by default: with one rank, hardly any promise could break.
    on_cpu = settings.cpu or not detect().num_devices
    count = settings.num_processes or 1
    if on_cpu and not resolved.is_given("num_processes"):
        count = 2
    with interruptible():
        return launch(
            check_this_world,
            kwargs={"as_json": as_json},
            num_processes=count,
            cpu=settings.cpu,
            gpu_ids=settings.gpu_ids,
            threads_per_process=settings.threads_per_process,
            timeout_s=settings.timeout_s or _TIMEOUT_S,
        )[0]


def check_this_world(*, as_json: bool) -> bool:
    """Check the world of this rank, print on rank 0, and return whether all promises hold."""
    from accel_fn.core.primitives import default_backend
    from accel_fn.parallel.world import init
    from accel_fn.testing.promises import check_promises

    # The promises are about ranks that share each batch, so put all ranks along `dp`.
    state = init(mesh={"dp": -1})
    prints_rows = state.is_main and not as_json
    if prints_rows:
        click.echo("verdict   largest   bound  promise")
    verdicts = check_promises(state, _print_row if prints_rows else lambda _: None)
    num_held = sum(each.holds for each in verdicts)
    backend = default_backend(state.device, None) if state.world_size > 1 else "none"
    if prints_rows:
        ranks = f"{state.world_size} rank{'s' if state.world_size > 1 else ''}"
        where = f"{ranks}, {state.device}, backend {backend}"
        click.echo(f"{num_held} of {len(verdicts)} promises hold on {where}")
        if state.world_size == 1:
            click.echo(
                "On one rank there is no other to compare with: -n 2 --cpu checks what ranks share."
            )
    elif state.is_main:
        print_json(
            {
                "holds": num_held == len(verdicts),
                "num_processes": state.world_size,
                "device": str(state.device),
                "backend": backend,
                "promises": [
                    {
                        "promise": each.promise,
                        "holds": each.holds,
                        # JSON has no infinity and no NaN.
                        "largest": each.largest
                        if math.isfinite(each.largest)
                        else str(each.largest),
                        "bound": each.bound,
                    }
                    for each in verdicts
                ],
            }
        )
    return num_held == len(verdicts)


def _print_row(verdict: Verdict) -> None:
    """Print one promise; click leaves out colours if the output is not a terminal."""
    status, colour = ("holds", "green") if verdict.holds else ("broken", "red")
    row = wrapped(f"{status:<8}{verdict.largest:>9.3g}{verdict.bound:>8g}  ", verdict.promise)
    click.echo(click.style(status, fg=colour) + row.removeprefix(status))
