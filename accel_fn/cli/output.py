"""Functions that commands share, such as for options, settings, tables, errors and Ctrl-C."""

from __future__ import annotations

import json
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from accel_fn.errors import AccelError
from accel_fn.launcher.settings import Resolved, resolve

FILE = click.Path(dir_okay=False, path_type=Path)
SHELL_FILE = click.Path(readable=False)
"""The name of a file, which shells can complete; the command checks that it exists."""

Cell = tuple[str, str]
"""A text, and the style in which a terminal shows it."""

_LENGTHS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def config_option(text: str = "Settings to start from.") -> Callable[[Any], Any]:
    return click.option("--config", "config_file", type=FILE, metavar="FILE", help=text)


def num_processes_option(text: str) -> Callable[[Any], Any]:
    kind = click.IntRange(min=1)
    return click.option("-n", "--num-processes", type=kind, metavar="N", help=text)


def mesh_option(text: str) -> Callable[[Any], Any]:
    return click.option("--mesh", metavar="AXES", help=text)


def runs_argument() -> Callable[[Any], Any]:
    kind = click.Path(exists=True, path_type=Path)
    return click.argument("paths", nargs=-1, required=True, metavar="RUN...", type=kind)


def json_option(text: str = "Print JSON.") -> Callable[[Any], Any]:
    return click.option("--json", "as_json", is_flag=True, help=text)


def resolve_settings(flags: Mapping[str, object], config_file: Path | None) -> Resolved:
    """Resolve the settings of a launch; print warnings on stderr, an error as one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with one_line_errors():
            resolved = resolve(flags, config=config_file)
    for each in caught:
        click.echo(f"Warning: {each.message}", err=True)
    return resolved


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str | Cell]]) -> None:
    """Print a table on a terminal; anywhere else, aligned columns of plain text, never cut."""
    if not sys.stdout.isatty():
        _print_plain(
            [
                headings,
                *[[each if isinstance(each, str) else each[0] for each in row] for row in rows],
            ]
        )
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    names = [row[0] if isinstance(row[0], str) else row[0][0] for row in (headings, *rows)]
    # Names stay whole, so that they can be copied.
    first = Column(headings[0], no_wrap=True, min_width=max(map(len, names)))
    table = Table(first, *[Column(each, overflow="fold") for each in headings[1:]], box=SIMPLE_HEAD)
    for row in rows:
        cells = [(cell, "") if isinstance(cell, str) else cell for cell in row]
        table.add_row(*[Text(text, style=style) for text, style in cells])
    Console().print(table)


def _print_plain(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def wrapped(label: str, text: str) -> str:
    """Wrap a text at words to 80 columns; later lines are indented to the start of the text."""
    return textwrap.fill(
        text,
        80,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def readable_bytes(size: int | None) -> str:
    """Format bytes in units of 1024; `-` if unknown."""
    if size is None:
        return "-"
    scaled, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if scaled < 1024:
            break
        scaled, unit = scaled / 1024, larger
    return f"{size} B" if unit == "B" else f"{scaled:.2f} {unit}"


def readable_seconds(seconds: float) -> str:
    """Format seconds as `1 d 4 h`, `2 h 5 min`, `3 min 20 s` or `12.3 s`."""
    for length, unit, smaller, small_unit in _LENGTHS:
        whole = round(seconds / smaller) * smaller
        if whole >= length:
            return f"{whole // length} {unit} {whole % length // smaller} {small_unit}"
    return f"{seconds:.1f} s"


@contextmanager
def at_work(text: str) -> Iterator[Callable[[str], None]]:
    """Show a text on a terminal while a command works; yield a function that changes the text."""
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status.update


def print_json(value: object) -> None:
    """Print a value as JSON for another program; objects that JSON lacks, such as paths, become texts."""
    print(json.dumps(value, indent=2, default=str))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn accel_fn's errors into click's, which print their message without a traceback."""
    try:
        yield
    except AccelError as error:
        raise click.ClickException(str(error)) from None


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C, so that clean-up code runs; then exit the command."""
    before = signal.getsignal(signal.SIGINT)
    # A shell starts background commands with Ctrl-C ignored. Do not change that.
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
