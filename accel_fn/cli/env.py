"""The command `env`: print what a bug report needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from accel_fn.cli.output import json_option, print_json


@click.command()
@json_option()
def env(*, as_json: bool) -> None:
    """Print what a bug report needs: versions, machine, devices, variables.

    Torch is imported in another process, so that a broken torch is a line of the report. Of the
    environment, only variables that launchers and torch read are shown.
    """
    from accel_fn.launcher.env_report import collect

    report = collect()
    if as_json:
        print_json(report)
    else:
        click.echo("\n".join(_lines(report)))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    """A section for each part; what is missing reads `-`."""
    for section, content in report.items():
        yield section.replace("_", " ")
        if isinstance(content, dict):
            for name, value in content.items():
                shown = name if section == "variables" else name.replace("_", " ")
                yield from _entry(shown, value)
        else:
            yield from (f"  {line}" for line in _shown(section, content).splitlines())
        yield ""


def _entry(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = ", ".join(f"{each} {_shown(each, part)}" for each, part in value.items())
    if isinstance(value, list) and value and isinstance(value[0], dict):
        yield f"  {name}"
        for each in value:
            yield "    " + ", ".join(_shown(part, held) for part, held in each.items())
        return
    text = _shown(name, value)
    if "\n" in text:
        yield f"  {name}"
        yield from (f"    {line}" for line in text.splitlines())
    else:
        yield f"  {name:<18} {text}"


def _shown(name: str, value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if name in ("total", "available", "limit", "memory"):
        return f"{value / 2**30:.1f} GiB"
    return str(value)
