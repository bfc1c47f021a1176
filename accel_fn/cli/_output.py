"""How commands speak: tables, plain where nobody looks; JSON; errors in a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from accel_fn._errors import AccelError

Cell = tuple[str, str]
"""Text, and the style in which a terminal shows it."""


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str | Cell]]) -> None:
    """A table on a terminal; aligned columns of plain text anywhere else, never cut."""
    if not sys.stdout.isatty():
        _print_plain([headings, *[[_text(cell) for cell in row] for row in rows]])
        return
    table = Table(*headings, box=box.SIMPLE_HEAD)
    for row in rows:
        cells = [(cell, "") if isinstance(cell, str) else cell for cell in row]
        table.add_row(*[Text(text, style=style) for text, style in cells])
    Console().print(table)


def _text(cell: str | Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]


def _print_plain(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def print_json(value: object) -> None:
    """For a program to read."""
    print(json.dumps(value, indent=2))


@contextmanager
def errors_in_a_line() -> Iterator[None]:
    """What we raise on purpose says it all: it needs no traceback."""
    try:
        yield
    except AccelError as error:
        raise click.ClickException(str(error)) from None
