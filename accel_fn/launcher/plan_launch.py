"""plan_launch and start: from settings to what each rank will be, and from that to the ranks."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel_fn.launcher.machines.cpus import bind_ranks, read_processors
from accel_fn.launcher.machines.detect import detect
from accel_fn.launcher.machines.machines import Machines, place
from accel_fn.launcher.processes.command import Command, Kind, check_command
from accel_fn.launcher.processes.environment import Variable, launch_variables
from accel_fn.launcher.settings.settings import Settings
from accel_fn.launcher.settings.sources import Resolved


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything about a launch that is known before it starts."""

    command: Command
    settings: Settings
    machines: Machines
    variables: Sequence[Variable]
    """Alike for all ranks here."""
    cpus: Sequence[Sequence[int]] | None
    """The processors of each local rank; None: any."""


def plan_launch(
    resolved: Resolved,
    kind: Kind,
    target: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] = os.environ,
) -> LaunchPlan:
    """What a launch with these settings would do on this machine.

    Args:
        resolved: the settings, and who gave each.
        kind: what `target` is: a script, a module or a program.
        target: what each rank runs.
        arguments: its own.
        environment: of this process.

    Returns:
        A plan. Nothing has started.

    Raises:
        ValueError: there is no such script, module or program.
        RuntimeError: nobody says where the machines meet, or settings and cluster differ.
    """
    command = Command(kind, target, arguments)
    check_command(command)
    settings, machines = resolved.settings, place(resolved, environment)
    processors = read_processors()
    cpus = bind_ranks(processors, machines.num_local)
    if cpus and not settings.cpu and detect(environment).num_devices:
        cpus = None  # a rank should be near its accelerator, and that is for the driver to say
    return LaunchPlan(
        command=command,
        settings=settings,
        machines=machines,
        variables=launch_variables(settings, machines, processors, environment),
        cpus=cpus,
    )


def start(plan: LaunchPlan) -> int:
    """Do it; give back the exit code."""
    running = _import_quietly("accel_fn.launcher.processes.run")
    gc.enable()  # the command has switched it off for its imports
    command = plan.command
    cpus = [",".join(map(str, each)) for each in plan.cpus or ()]
    job = running.Job(
        command=[command.kind, command.target, *command.arguments],
        variables={each.name: each.value for each in plan.variables if each.value is not None},
        cpus=";".join(cpus),
        max_restarts=plan.settings.max_restarts,
        log_dir=plan.settings.log_dir,
        tee=plan.settings.tee,
    )
    exit_code: int = running.run(job, plan.machines)
    return exit_code


def _import_quietly(name: str) -> Any:
    """Import torch so that its stores do not warn of machines that are gone; for this process alone."""
    variable = "TORCH_CPP_LOG_LEVEL"
    if variable in os.environ:
        return importlib.import_module(name)
    os.environ[variable] = "ERROR"
    try:
        return importlib.import_module(name)
    finally:
        del os.environ[variable]
