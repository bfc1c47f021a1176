"""Write settings as a commented YAML file, which reads back as the same settings."""

from __future__ import annotations

import math
from pathlib import Path

import yaml

from accel_fn.launcher.settings.settings import RULES, Settings

_HEAD = """\
# Settings of `accel-fn launch` in this folder and below. A flag or a variable, such as
# ACCEL_FN_NUM_PROCESSES, goes before a line here. A line that is commented out is left open.
"""


def render(settings: Settings) -> str:
    """The text of a file: a line for each setting, commented out if it was not set."""
    return "\n".join([_HEAD, *(_entry(settings, name) for name in Settings.model_fields)])


def _entry(settings: Settings, name: str) -> str:
    about = f"# {Settings.model_fields[name].description} ({RULES[name].removeprefix('be ')})"
    mark = "" if name in settings.model_fields_set else "# "
    return f"{about}\n{mark}{_line(name, getattr(settings, name))}"


def _line(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return f"{name}: {list(value)}\n"
    plain = str(value) if isinstance(value, Path) else value
    # Any bound on the width would fold long paths into several lines; left unescaped, the
    # line ends of Unicode would be folded when read.
    readable = str(plain).isprintable()
    return yaml.safe_dump({name: plain}, allow_unicode=readable, width=math.inf)
