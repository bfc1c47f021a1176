"""The command `launch`: run a script on many processes."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path
from typing import Any

import click

from accel_fn.cli.output import FILE_FOR_SHELLS
from accel_fn.errors import AccelError

_FILE = click.Path(dir_okay=False, path_type=Path)
_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(
    context_settings={
        "allow_interspersed_args": False,  # what follows the script is the script's
        "token_normalize_func": lambda name: name.replace("_", "-"),  # as accelerate spells them
    },
)
@click.option(
    "-n",
    "--num-processes",
    type=int,
    help="Processes, over all machines.  [default: the accelerators here, else 1]",
)
@click.option("--cpu", is_flag=True, default=None, help="Train on the CPU.")
@click.option("--gpu-ids", metavar="LIST", help="Accelerators to use, such as 0,1.")
@click.option(
    "--threads-per-process", type=int, help="CPU threads of each.  [default: the cores, divided]"
)
@click.option("--num-machines", type=int, help="Machines.  [default: the cluster's, else 1]")
@click.option("--machine-rank", type=int, help="Which of them this is, from 0.")
@click.option("--main-process-ip", metavar="HOST", help="Address of machine 0.")
@click.option(
    "--main-process-port",
    type=int,
    help="Port on machine 0.  [default: a free one; 29500 for several machines]",
)
@click.option(
    "--rdzv-backend",
    type=click.Choice(["static", "c10d", "etcd-v2"]),
    help="How machines find each other.  [default: static]",
)
@click.option(
    "--max-restarts", type=int, help="Start the world again after so many failures.  [default: 0]"
)
@click.option(
    "--timeout-s", type=float, help="Seconds after which a stuck collective is reported and ended."
)
@click.option(
    "--mixed-precision",
    type=click.Choice(["no", "fp16", "bf16"]),
    help="What with_amp() without an argument does.",
)
@click.option("--num-microbatches", type=int, help="What accumulate() without an argument does.")
@click.option(
    "--wrap",
    type=click.Choice(["ddp", "fsdp"]),
    help="What wrap() does: replicas, or shards.  [default: ddp]",
)
@click.option("--log-dir", type=_FOLDER, help="Put the output of each rank into files in there.")
@click.option("--tee", is_flag=True, default=None, help="Show it too, each line with its rank.")
@click.option("--config", "config_file", type=_FILE, metavar="FILE", help="Settings to start from.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.option("--no-python", is_flag=True, help="SCRIPT is a program.")
@click.option("--dry-run", is_flag=True, help="Start nothing: show what each rank would get.")
@click.option("--json", "as_json", is_flag=True, help="Show it as JSON.")
@click.argument("script", type=FILE_FOR_SHELLS)
@click.argument("arguments", nargs=-1, type=FILE_FOR_SHELLS, metavar="[ARGS]...")
def launch(
    *,
    config_file: Path | None,
    module: bool,
    no_python: bool,
    dry_run: bool,
    as_json: bool,
    script: str,
    arguments: tuple[str, ...],
    **flags: Any,
) -> None:
    """Run a script on every process of a world.

    ARGS are the script's own, also where they look like options of this command. What no
    option says, `accel-fn config --show` explains.

    The exit code is that of the rank that failed first; 128 + the signal where it was killed.
    """
    gc.disable()  # what imports make stays: looking for garbage in it costs a tenth of their time
    if module and no_python:
        raise click.UsageError("--module cannot be combined with --no-python")
    if as_json and not dry_run:
        raise click.UsageError("--json needs --dry-run")
    kind = "module" if module else "program" if no_python else "script"
    resolved = importlib.import_module("accel_fn.cli.resolve").resolve_or_fail(
        flags, config=config_file
    )
    launching = importlib.import_module("accel_fn.launcher.plan_launch")
    try:
        plan = launching.plan_launch(resolved, kind, script, arguments)
        if dry_run:
            importlib.import_module("accel_fn.cli.dry_run").show(plan, as_json=as_json)
        else:
            sys.exit(launching.start(plan))
    except AccelError as error:
        raise click.ClickException(str(error)) from None
