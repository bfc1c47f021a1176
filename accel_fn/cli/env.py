"""The command `env`: print the facts for a bug report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from accel_fn.cli.output import at_work, json_option, print_json, readable_bytes, wrapped

_NAME_WIDTH = 28


@click.command()
@json_option()
def env(*, as_json: bool) -> None:
    """Print the facts for a bug report: versions, machine, devices, variables.

    Torch is imported in another process, so that a broken torch is a line of the report. Of the
    environment, only variables that launchers and torch read are shown.
    """
    from accel_fn.launcher.env_report import collect

    with at_work("collecting"):
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
                yield from _entry(name if section == "variables" else name.replace("_", " "), value)
        else:
            yield from (f"  {line}" for line in _shown(section, content).splitlines())
        yield ""


def _entry(name: str, value: Any) -> Iterator[str]:
    """The name and its value; a value of several lines is below the name."""
    if isinstance(value, dict):
        value = ", ".join(f"{each} {_shown(each, part)}" for each, part in value.items())
    lines = _shown(name, value).splitlines()
    if len(lines) > 1:
        yield f"  {name}"
        yield from (f"    {line}" for line in lines)
    else:
        yield wrapped(f"  {name:<{_NAME_WIDTH}} ", "".join(lines))


def _shown(name: str, value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return readable_bytes(value) if name in ("total", "limit") else str(value)
