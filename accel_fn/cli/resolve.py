"""Resolving settings for a command: warnings and errors become lines on stderr."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import click

from accel_fn.cli.output import errors_in_a_line
from accel_fn.launcher.settings.sources import Resolved, resolve


def resolve_or_fail(flags: Mapping[str, object], *, config: Path | None = None) -> Resolved:
    """`resolve`, as a command says what is wrong."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with errors_in_a_line():
            resolved = resolve(flags, config=config)
    for each in caught:
        click.echo(f"Warning: {each.message}", err=True)
    return resolved
