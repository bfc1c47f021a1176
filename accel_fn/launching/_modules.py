"""Looking for a module as python would, without importing anything: a package may do much when imported."""

from __future__ import annotations

import difflib
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_MAY_ADD = ("__path__", "sys.modules", "meta_path", "declare_namespace")
"""Words of a package that may have modules which its folders do not show."""


def why_missing(target: str) -> str:
    """What is wrong with a module that `python -m` would not find; empty where it may be there."""
    try:
        return _why_missing(target)
    except Exception:  # somebody else's finder, made for imports alone
        return ""


def _why_missing(target: str) -> str:
    places: Sequence[str] = [os.getcwd(), *sys.path]
    inside, spec = "", None
    for part in target.split("."):
        name = f"{inside}{part}"
        spec = _find(name, places)
        if spec is None:
            return _nearest(target, inside, part, places)
        if _may_add(spec):
            return ""
        places = list(spec.submodule_search_locations or ())
        inside = f"{name}."
    if places and _find(f"{target}.__main__", places) is None:
        return f"{target} is a package without a __main__"
    return ""


def _find(name: str, places: Sequence[str]) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if finder is PathFinder:
            # By the last part alone: by its whole name, a namespace asks for its parent's import.
            found = PathFinder.find_spec(name.rpartition(".")[2], places)
        else:
            found = finder.find_spec(name, places if "." in name else None)
        if found is not None:
            return found
    return None


def _may_add(spec: ModuleSpec) -> bool:
    """Only its import would tell which modules are in there."""
    if spec.loader is None:
        return False  # a namespace: folders alone
    if not isinstance(spec.loader, InspectLoader):
        return True
    source = spec.loader.get_source(spec.name)
    return source is None or any(word in source for word in _MAY_ADD)


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
