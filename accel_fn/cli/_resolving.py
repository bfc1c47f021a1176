"""Resolving settings for a command: its warnings and errors become lines on stderr."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import click

from accel_fn._errors import SettingsError
from accel_fn.launching._sources import Resolved, resolve


def resolve_or_fail(flags: Mapping[str, object], *, config: Path | None = None) -> Resolved:
    """`resolve`, as a command says what is wrong."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            resolved = resolve(flags, config=config)
        except SettingsError as error:
            raise click.ClickException(str(error)) from None
    for each in caught:
        click.echo(f"Warning: {each.message}", err=True)
    return resolved
