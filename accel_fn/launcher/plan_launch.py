"""Plan a launch on this machine: the command, checked before the start, its variables and processors."""

from __future__ import annotations

import difflib
import os
import pkgutil
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from accel_fn.errors import ArgumentError, WorldError, message
from accel_fn.launcher.machines.cpus import bind_ranks, read_processors
from accel_fn.launcher.machines.detect import detect
from accel_fn.launcher.machines.machines import Machines, place
from accel_fn.launcher.processes.environment import Variable, launch_variables
from accel_fn.launcher.settings.settings import Settings
from accel_fn.launcher.settings.sources import Resolved

Kind = Literal["script", "module", "program"]


@dataclass(frozen=True, slots=True)
class Command:
    """A target of some kind and its arguments."""

    kind: Kind
    target: str
    arguments: Sequence[str]

    def command_line(self) -> list[str]:
        """The command line without a launcher."""
        start = {"script": ["python"], "module": ["python", "-m"], "program": []}[self.kind]
        return [*start, self.target, *self.arguments]


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
    _check_command(command)
    check_temporary_folder()
    settings, machines = resolved.settings, place(resolved, environment)
    processors = read_processors()
    cpus = bind_ranks(processors, machines.num_local)
    if cpus and not settings.cpu and detect(environment).num_devices:
        # A rank should be near its accelerator, and only the driver knows where that is.
        cpus = None
    return LaunchPlan(
        command=command,
        settings=settings,
        machines=machines,
        variables=launch_variables(settings, machines, processors, environment),
        cpus=cpus,
    )


def check_temporary_folder() -> None:
    """Refuse a machine on which no temporary file can be made."""
    # Ranks record there what ends them: without it, a failure would have no cause.
    try:
        tempfile.TemporaryFile().close()
    except OSError as error:
        raise WorldError(
            f"launch: temporary folder must be one to write to, got: {error}; set TMPDIR"
        ) from None


def _check_command(command: Command) -> None:
    """Refuse a target that is not there; name the nearest that is."""
    _CHECKS[command.kind](command.target)


def _check_script(target: str) -> None:
    path = Path(target)
    if path.is_file() or (path / "__main__.py").is_file():
        return
    folder = path.parent if path.parent.is_dir() else Path()
    names = [each.name for each in folder.iterdir() if each.suffix == ".py"]
    near = difflib.get_close_matches(path.name, names, n=1)
    repair = f"did you mean {folder / near[0]}?" if near else "use -m for a module"
    raise ArgumentError(message("launch", "script", "be a file", target, repair))


def _check_module(target: str) -> None:
    """Look for the outermost package alone: what is inside is known only after an import."""
    first, places = target.partition(".")[0], [os.getcwd(), *sys.path]
    if PathFinder.find_spec(first, places) or (first and find_spec(first)):
        return
    near = difflib.get_close_matches(
        first, [each.name for each in pkgutil.iter_modules(places)], n=1
    )
    repair = (
        f"did you mean {near[0]}?" if near else "it is looked for here, then where python looks"
    )
    raise ArgumentError(message("launch", "module", "be one that is found", target, repair))


def _check_program(target: str) -> None:
    if shutil.which(target) is None:
        rule = "be one that is found and may be run"
        raise ArgumentError(message("launch", "program", rule, target))


_CHECKS = {"script": _check_script, "module": _check_module, "program": _check_program}
