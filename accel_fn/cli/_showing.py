"""Printing the settings in force: a table, plain where nobody looks, or JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from accel_fn.cli._resolving import resolve_or_fail
from accel_fn.launching._sources import Resolved


def show(config_file: Path | None, *, as_json: bool) -> None:
    """Print each setting with its source."""
    resolved = resolve_or_fail({}, config=config_file)
    if as_json:
        print(json.dumps(_entries(resolved), indent=2))
    elif sys.stdout.isatty():
        Console().print(_table(resolved))
    else:
        _print_plain(resolved)


def _entries(resolved: Resolved) -> dict[str, dict[str, object]]:
    values = resolved.settings.model_dump(mode="json")
    return {
        name: {"value": value, "source": resolved.sources[name]} for name, value in values.items()
    }


def _rows(resolved: Resolved) -> list[tuple[str, str, str]]:
    values = resolved.settings.model_dump(mode="json")
    return [(name, _shown(value), resolved.sources[name]) for name, value in values.items()]


def _shown(value: object) -> str:
    """As it would stand in a file."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(resolved: Resolved) -> Table:
    """What somebody gave stands out from what was left open."""
    table = Table("setting", "value", "source")
    for name, value, source in _rows(resolved):
        style = "" if resolved.is_given(name) else "dim"
        table.add_row(*(Text(cell, style=style) for cell in (name, value, source)))
    return table


def _print_plain(resolved: Resolved) -> None:
    rows = [("setting", "value", "source"), *_rows(resolved)]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, source in rows:
        print(f"{name:<{first}}  {value:<{second}}  {source}")
