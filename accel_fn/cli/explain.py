"""The command `explain`: print one step of a plan, phase by phase."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from accel_fn.cli.output import (
    SHELL_FILE,
    config_option,
    interruptible,
    json_option,
    mesh_option,
    num_processes_option,
    one_line_errors,
    print_json,
    resolve_settings,
)
from accel_fn.cli.targets import as_plan, read_target
from accel_fn.core.mesh_axes import mesh_shape
from accel_fn.errors import ArgumentError, message
from accel_fn.launcher.plan_launch import settings_variables
from accel_fn.parallel.launch_options import launched_mesh

if TYPE_CHECKING:
    import torch


@click.command()
@click.argument("target", type=SHELL_FILE)
@num_processes_option("Ranks of the step.  [default: the launch's]")
@mesh_option("Axes of the ranks, such as dp=-1,tp=2.  [default: the launch's]")
@click.option("--device", help="Device of the ranks.  [default: this machine's]")
@config_option()
@json_option()
def explain(
    *,
    target: str,
    num_processes: int | None,
    mesh: str | None,
    device: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Print what one step of a plan does, phase by phase. Nothing is built or run.

    TARGET is FILE.py:NAME or MODULE:NAME, and names a function without arguments that gives a plan, a
    plan and a state, or a model. The settings that it leaves to the launch are those of `accel-fn config
    --show`.
    """
    from accel_fn.core.state import Axis, DistState, mesh_of
    from accel_fn.observe.explain import explain as explain_plan
    from accel_fn.observe.explain import phases

    with interruptible(), one_line_errors():
        settings = resolve_settings({"mesh": mesh}, config_file).settings
        # Set the variables that a launch with these settings would set, since the plan reads them.
        for each in settings_variables(settings):
            os.environ[each.name] = str(each.value)
        num_processes = num_processes or settings.num_processes or 1
        sizes = launched_mesh()
        shape = mesh_shape("explain", sizes, num_processes) if sizes else {}
        axes = tuple([Axis(axis, 0, size, None) for axis, size in shape.items()])
        state = DistState(world_size=num_processes, device=_device(device), axes=axes)
        plan = as_plan(read_target(target, "explain")[0])
        if as_json:
            found = {"num_processes": num_processes, "device": str(state.device)}
            print_json({**found, "mesh": mesh_of(state), "phases": phases(plan, state)})
        else:
            text = explain_plan(plan, state)
            print(_wrapped(text) if sys.stdout.isatty() else text)


def _wrapped(text: str) -> str:
    """Wrap lines at words for a terminal; indent continued lines to the start of the text."""
    columns = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(
            line,
            columns,
            subsequent_indent=" " * 13,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.splitlines()
    )


def _device(name: str | None) -> torch.device:
    """Return the device; any device that torch knows is allowed, since nothing runs."""
    import torch

    name = name or os.environ.get("ACCEL_FN_DEVICE") or None
    if name is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if found is None else found
    try:
        return torch.device(name)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ArgumentError(message("explain", "device", "be torch's", name, reason)) from None
