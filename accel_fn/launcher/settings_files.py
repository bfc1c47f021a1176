"""Files of settings: read YAML and TOML, with the line of each value; write YAML with comments."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from accel_fn.errors import SettingsError, message, shown
from accel_fn.launcher.settings import SETTINGS, Given, Layer, check_names
from accel_fn.plug_ins import plug_in

_HEAD = """\
# Settings of `accel-fn launch` in this folder and below. A flag or a variable, such as
# ACCEL_FN_NUM_PROCESSES, goes before a line here. A line that is commented out is left open.
"""

_OF_ACCELERATE = {"compute_environment", "distributed_type"}
"""Keys of a file that `accelerate config` wrote, which a plug-in translates."""

_SECTION = "[tool.accel_fn]"
_UNREADABLE = (yaml.YAMLError, ValueError, RecursionError)
"""Errors that the parsers of YAML and TOML raise. A number with too many digits, or an impossible
date, is a ValueError."""


def read_yaml(path: Path) -> Layer:
    """Read a file of settings, ours or accelerate's; refuse a file with a mistake."""
    text = _text(path)
    if not text.strip():
        raise SettingsError(message(str(path), "file", "hold settings", "an empty file"))
    try:
        given = _mapping(path, yaml.compose(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise SettingsError(f"{path}{place}: file must be YAML, got: {error.problem}") from None
    except _UNREADABLE as error:
        raise SettingsError(f"{path}: file must be YAML, got: {error}") from None
    if _OF_ACCELERATE & given.keys():
        translated: Layer = plug_in("accelerate.config", "config").translate(given)
        return translated
    return _known(given)


def read_pyproject(path: Path) -> Layer | None:
    """Read the section `[tool.accel_fn]` of a file; None if the file has no such section."""
    text = _text(path)
    if not re.search("accel[_-]fn", text):
        return None
    try:
        tools = tomllib.loads(text).get("tool", {})
    except _UNREADABLE as error:
        raise SettingsError(f"{path}: file must be TOML, got: {error}") from None
    if not isinstance(tools, dict):
        raise SettingsError(message(str(path), "tool", "be a section", tools))
    if "accel-fn" in tools:
        raise SettingsError(f"{path}: section must be {_SECTION}, got [tool.accel-fn]")
    if "accel_fn" not in tools:
        return None
    section = tools["accel_fn"]
    if not isinstance(section, dict):
        raise SettingsError(message(str(path), "tool.accel_fn", "be a section", section))
    return _known(
        {key: Given(value, str(path), _toml_line(text, key)) for key, value in section.items()}
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(message("config", "file", "exist", str(path))) from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: file must be text in UTF-8, got: {error.reason}") from None
    except OSError as error:
        raise SettingsError(f"{path}: file must be one to read, got: {error.strerror}") from None


def _known(given: Mapping[str, Given]) -> Layer:
    check_names({name: each.where for name, each in given.items()}, SETTINGS)
    return Layer(given)


def _mapping(path: Path, node: yaml.Node | None) -> dict[str, Given]:
    """Read keys, values and lines; refuse a repeated key, which YAML's own loader accepts."""
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        where = f"{path}:{node.start_mark.line + 1}"
        raise SettingsError(f"{where}: file must be lines of `name: value`, got {_shape(node)}")
    given: dict[str, Given] = {}
    for key_node, value_node in node.value:
        key, line = _value(key_node), key_node.start_mark.line + 1
        key = key if isinstance(key, str) else shown(key)
        if key in given:
            raise SettingsError(
                f"{path}:{line}: {key} must stand once, got it in line {given[key].line} too"
            )
        given[key] = Given(_value(value_node), str(path), line)
    return given


def _shape(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else shown(node.value)


def _value(node: yaml.Node) -> Any:
    return yaml.SafeLoader("").construct_document(node)


def _toml_line(text: str, key: str) -> int | None:
    """Search a text for the line of a key: the TOML parser does not return line numbers."""
    start = text.find(_SECTION)
    found = re.compile(rf"""^\s*["']?{re.escape(key)}["']?\s*=""", re.MULTILINE).search(
        text, max(start, 0)
    )
    return text.count("\n", 0, found.start() + len(found[0])) + 1 if found and start >= 0 else None


def render(given: Mapping[str, object]) -> str:
    """Return the text of a file: one line per setting, commented out if it is not given."""
    entries = []
    for name, setting in SETTINGS.items():
        mark = "" if name in given else "# "
        line = _line(name, given.get(name, setting.default))
        entries.append(f"# {setting.about} ({setting.kind.rule})\n{mark}{line}")
    return "\n".join([_HEAD, *entries])


def _line(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return f"{name}: {list(value)}\n"
    plain = str(value) if isinstance(value, Path) else value
    # Without `width`, long paths would be folded into several lines. `allow_unicode` would leave
    # Unicode's line ends unescaped, and a reader would take them for spaces.
    readable = str(plain).isprintable()
    return yaml.safe_dump({name: plain}, allow_unicode=readable, width=math.inf)
