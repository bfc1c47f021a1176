"""The command that each rank runs: a script, a module or a program, checked before the start."""

from __future__ import annotations

import difflib
import os
import pkgutil
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from accel_fn.errors import ArgumentError, message

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


def check_command(command: Command) -> None:
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
