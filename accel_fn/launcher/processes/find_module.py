"""Find a module as Python would, without importing it if folders are enough."""

from __future__ import annotations

import difflib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_MISSING = 3
_FIND = f"""
import importlib.util, sys
name = sys.argv[1]
try:
    is_there = importlib.util.find_spec(name) is not None
except ModuleNotFoundError as error:
    is_there = not f"{{name}}.".startswith(f"{{error.name}}.")  # it is, and misses another
sys.exit(0 if is_there else {_MISSING})
"""


def why_missing(target: str) -> str:
    """Why `python -m` would not find a module; empty if it may be there."""
    try:
        return _why_missing(target)
    except Exception:  # a foreign finder that only serves imports
        return ""


def _why_missing(target: str) -> str:
    places: Sequence[str] = [os.getcwd(), *sys.path]
    inside = ""
    for part in target.split("."):
        spec = _find(f"{inside}{part}", places)
        if spec is None:
            return "" if inside and _is_added(target) else _nearest(target, inside, part, places)
        places = list(spec.submodule_search_locations or ())
        inside += f"{part}."
    main = f"{target}.__main__"
    if places and _find(main, places) is None and not _is_added(main):
        return f"{target} is a package without a __main__"
    return ""


def _find(name: str, places: Sequence[str]) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if finder is PathFinder:
            # By the last part: the whole name of a namespace would import its parent.
            found = PathFinder.find_spec(name.rpartition(".")[2], places)
        else:
            found = finder.find_spec(name, places if "." in name else None)
        if found is not None:
            return found
    return None


def _is_added(name: str) -> bool:
    """Does a package add it when it is imported? Only an import shows, in another process."""
    command = [sys.executable, "-c", _FIND, name]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return done.returncode != _MISSING


def _nearest(target: str, inside: str, part: str, places: Sequence[str]) -> str:
    if Path(target).is_file():
        return "leave out -m for a file"
    near = difflib.get_close_matches(
        part, [each.name for each in pkgutil.iter_modules(places)], n=1
    )
    if near:
        return f"did you mean {inside}{near[0]}?"
    if inside:
        return f"there is no {part!r} in {inside[:-1]}"
    return "it is looked for in this folder, then where python looks"
