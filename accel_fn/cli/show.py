"""Printing the settings in force, each with its source."""

from __future__ import annotations

from pathlib import Path

from accel_fn.cli.output import Cell, print_json, print_table
from accel_fn.cli.resolve import resolve_or_fail


def show(config_file: Path | None, *, as_json: bool) -> None:
    """A table, in which what somebody gave stands out; or JSON."""
    resolved = resolve_or_fail({}, config=config_file)
    values, sources = resolved.settings.model_dump(mode="json"), resolved.sources
    if as_json:
        print_json(
            {name: {"value": value, "source": sources[name]} for name, value in values.items()}
        )
        return
    rows: list[list[Cell]] = []
    for name, value in values.items():
        style = "" if resolved.is_given(name) else "dim"
        rows.append([(cell, style) for cell in (name, _shown(value), sources[name])])
    print_table(["setting", "value", "source"], rows)


def _shown(value: object) -> str:
    """As it would stand in a file."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
