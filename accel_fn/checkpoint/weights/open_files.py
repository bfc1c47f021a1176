"""A set of weight files, opened: all that they claim is checked, and no tensor is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from accel_fn.checkpoint.weights.files import FROZEN, INDEX, SINGLE, TIED
from accel_fn.errors import ArgumentError, ArgumentTypeError, message


@dataclass(frozen=True, slots=True)
class Stored:
    """RunState of one set of files."""

    handles: Mapping[str, Any]
    """Key -> the open file that holds it."""
    keys: Mapping[str, str]
    """Key -> its name in that file, another one where keys were renamed."""
    tied: Mapping[str, str]
    """Another name -> the key that holds its value."""
    frozen: Mapping[str, str]
    """Parameter that the set leaves out -> hash of its bytes."""

    def key_of(self, name: str) -> str | None:
        return name if name in self.handles else self.tied.get(name)

    def tensor(self, key: str) -> Tensor:
        """Map a tensor [...] from its file onto the host; what is not touched is not read."""
        return cast("Tensor", self.handles[key].get_tensor(self.keys[key]))

    def renamed(self, rename: Callable[[str], str]) -> Stored:
        """The same tensors under other names."""
        names: dict[str, str] = {}
        olds: dict[str, str] = {}
        for name in [*self.handles, *self.tied, *self.frozen]:
            new = names[name] = rename(name)
            if not isinstance(new, str):
                rule = f"return the name of {name!r} in the model"
                raise ArgumentTypeError(message("load_model", "rename", rule, new))
            if olds.setdefault(new, name) != name:
                rule = f"return different names for {olds[new]!r} and {name!r}"
                raise ArgumentError(message("load_model", "rename", rule, new))
        return Stored(
            {names[key]: file for key, file in self.handles.items()},
            {names[key]: name for key, name in self.keys.items()},
            {names[name]: names[first] for name, first in self.tied.items()},
            {names[name]: each for name, each in self.frozen.items()},
        )


def open_set(folder: Path, stack: ExitStack) -> Stored:
    if (folder / SINGLE).exists():
        return _stored(folder, {SINGLE: _open(folder, SINGLE, stack)})
    if not (folder / INDEX).is_file():
        raise _refusal(folder, f"hold {SINGLE} or {INDEX}", "neither")
    before = _identity(folder / INDEX)
    index = _read_index(folder)
    files = {name: _open(folder, name, stack) for name in sorted(set(index.values()))}
    if _identity(folder / INDEX) != before:  # a save puts a new index before it touches old shards
        raise _refusal(folder, "stay as it is while it is read", "a new set; load again")
    stored = _stored(folder, files)
    for key, name in index.items():
        if stored.handles.get(key) is not files[name]:
            raise _refusal(folder / INDEX, "name the file that holds each key", (key, name))
    for key in stored.handles:
        if key not in index:
            raise _refusal(folder / INDEX, "list every key of its files", f"no {key!r}")
    return stored


def _refusal(path: Path, rule: str, found: object) -> ArgumentError:
    found = found if isinstance(found, str) else repr(found)
    return ArgumentError(f"load_model: {path} must {rule}, got {found}")


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def _read_index(folder: Path) -> dict[str, str]:
    path = _inside(folder, INDEX)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _refusal(path, "be JSON", f"{type(error).__name__}: {error}") from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict):
        raise _refusal(path, "have a weight_map from keys to file names", files)
    for key, name in files.items():
        if not isinstance(name, str) or not _is_plain(name):
            rule = "name .safetensors files beside it, without any path"
            raise _refusal(path, rule, f"{name!r} for {key!r}")
    return files


def _is_plain(name: str) -> bool:
    plain = name == PureWindowsPath(name).name  # this class knows / as well
    return plain and name.endswith(".safetensors") and name.isprintable()


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file that no link leads away from its folder."""
    real, home = Path(os.path.realpath(folder / name)), Path(os.path.realpath(folder))
    homes = [home]
    if home.parent.name == "snapshots":  # the hub's cache: snapshots link to files in blobs
        homes.append(home.parent.parent / "blobs")
    if real.parent not in homes:
        raise _refusal(folder / name, "be a file of its folder", f"a link to {real}")
    if not real.is_file():
        raise _refusal(folder / name, "be a file", "none")
    return folder / name


def _open(folder: Path, name: str, stack: ExitStack) -> Any:
    path = _inside(folder, name)
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise _refusal(path, "be a whole safetensors file", str(error)) from error


def _stored(folder: Path, files: Mapping[str, Any]) -> Stored:
    handles: dict[str, Any] = {}
    tied: dict[str, str] = {}
    frozen: dict[str, str] = {}
    for name, file in files.items():
        keys = set(file.keys())
        twice = sorted(keys & handles.keys())
        if twice:
            raise _refusal(folder / name, "hold no key of another file", twice[0])
        handles.update(dict.fromkeys(file.keys(), file))
        path, rule = folder / name, f"tie names to its own keys in {TIED}"
        tied |= _listed(path, file, TIED, rule, keys.__contains__)
        frozen |= _listed(path, file, FROZEN, f"list a hash of each parameter in {FROZEN}", bool)
    for name in tied:
        if name in handles:
            raise _refusal(folder, "hold a tied name once", f"{name!r} as a tensor too")
    return Stored(handles, {key: key for key in handles}, tied, frozen)


def _listed(
    path: Path, file: Any, key: str, rule: str, fits: Callable[[str], bool]
) -> dict[str, str]:
    """Read names, with a text that fits for each, from the metadata of a file."""
    text = (file.metadata() or {}).get(key, "{}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(
        isinstance(each, str) and fits(each) for each in found.values()
    ):
        raise _refusal(path, rule, text)
    return found
