"""How commands speak: tables, plain where nobody looks; JSON; errors in a line."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from accel_fn.errors import AccelError

FILE_FOR_SHELLS = click.Path(readable=False)
"""What a shell completes as a file; it is checked elsewhere."""

Cell = tuple[str, str]
"""Text, and the style in which a terminal shows it."""


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str | Cell]]) -> None:
    """A table on a terminal; aligned columns of plain text anywhere else, never cut."""
    if not sys.stdout.isatty():
        _print_plain([headings, *[[_text(cell) for cell in row] for row in rows]])
        return
    # Imported here: most commands print no table, and most tables go to no terminal.
    table = importlib.import_module("rich.table").Table(
        *headings, box=importlib.import_module("rich.box").SIMPLE_HEAD
    )
    text_of = importlib.import_module("rich.text").Text
    for row in rows:
        cells = [(cell, "") if isinstance(cell, str) else cell for cell in row]
        table.add_row(*[text_of(text, style=style) for text, style in cells])
    importlib.import_module("rich.console").Console().print(table)


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


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """Ctrl-C is an exception in here, so that what was begun is tidied up; then the command ends by it."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        command = click.get_current_context().command_path
        click.echo(f"{command}: stopped by Ctrl-C", err=True)
        raise click.exceptions.Exit(128 + signal.SIGINT) from None
    finally:
        signal.signal(signal.SIGINT, before)
