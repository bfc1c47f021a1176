"""Plan a launch on this machine from settings."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accel_fn.errors import WorldError
from accel_fn.launcher.machines.cpus import bind_ranks, read_processors
from accel_fn.launcher.machines.detect import detect
from accel_fn.launcher.machines.machines import Machines, place
from accel_fn.launcher.processes.command import Command, Kind, check_command
from accel_fn.launcher.processes.environment import Variable, launch_variables
from accel_fn.launcher.settings.settings import Settings
from accel_fn.launcher.settings.sources import Resolved


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A launch before it starts."""

    command: Command
    settings: Settings
    machines: Machines
    variables: Sequence[Variable]
    """The same for all ranks of this machine."""
    cpus: Sequence[Sequence[int]] | None
    """The processors of each local rank; None: any."""


def plan_launch(
    resolved: Resolved,
    kind: Kind,
    target: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] = os.environ,
) -> LaunchPlan:
    """Plan a launch on this machine; start nothing, but raise errors that can be known before."""
    command = Command(kind, target, arguments)
    check_command(command)
    check_temporary_folder()
    settings, machines = resolved.settings, place(resolved, environment)
    processors = read_processors()
    cpus = bind_ranks(processors, machines.num_local)
    if cpus and not settings.cpu and detect(environment).num_devices:
        cpus = (
            None  # a rank should be near its accelerator, and only the driver knows where that is
        )
    return LaunchPlan(
        command=command,
        settings=settings,
        machines=machines,
        variables=launch_variables(settings, machines, processors, environment),
        cpus=cpus,
    )


def check_temporary_folder() -> None:
    """Refuse a machine on which no temporary file can be made: ranks record there what ends them."""
    try:
        tempfile.TemporaryFile().close()
    except OSError as error:
        raise WorldError(
            f"launch: temporary folder must be one to write to, got: {error}; set TMPDIR"
        ) from None
