"""The command `migrate`: print the replacements of accelerate in a script."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from accel_fn.cli.output import (
    at_work,
    interruptible,
    json_option,
    one_line_errors,
    print_json,
    wrapped,
)
from accel_fn.contrib.migrate.table import DIFFERENCES
from accel_fn.errors import ExtraError

if TYPE_CHECKING:
    from accel_fn.contrib.migrate.loops import Loop
    from accel_fn.contrib.migrate.read import Line, Script, Use
    from accel_fn.contrib.migrate.verify import Result

_PAGE = "docs/differences.md#from-accelerate"
_INDENT = " " * 6
_COLUMNS = 80


_SCRIPT = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(
    epilog="Example: accel-fn migrate train.py; accel-fn migrate --verify train.py new.py -- --epochs 1"
)
@click.option(
    "--verify",
    "pair",
    nargs=2,
    type=_SCRIPT,
    metavar="OLD NEW",
    help="Run both scripts with ARGS, and compare their updates.",
)
@click.option(
    "--updates",
    type=click.IntRange(1, 1000),
    default=20,
    show_default=True,
    help="The most updates that --verify compares.",
)
@json_option()
@click.argument("arguments", nargs=-1, metavar="SCRIPT | [-- ARGS...]")
def migrate(
    *, pair: tuple[Path, Path] | None, updates: int, as_json: bool, arguments: tuple[str, ...]
) -> None:
    """Print what takes the place of accelerate in SCRIPT, line by line, and what differed.

    Each line with a name of accelerate is followed by its replacement, the reason, and the measured
    cases in which accelerate's result is not that of one process. For each loop follow the loss function,
    the recipe and the plan that take its place, and what is left to do by hand, with the reason. SCRIPT is
    read, not run or changed.

    With --verify, OLD runs on one process, and NEW on one and on two. The loss and the rows of each update
    are compared up to the first difference, which is explained if it is a known one. The exit code
    is 0 if all updates are equal, or if OLD computes the first difference wrongly. Both run in folders of
    their own with links to the files of this one.
    """
    if pair is not None:
        _verify(pair, updates, arguments, as_json=as_json)
        return
    if len(arguments) != 1:
        raise click.UsageError("migrate takes one SCRIPT, or --verify OLD NEW -- ARGS")
    script = _SCRIPT.convert(arguments[0], None, click.get_current_context())
    with one_line_errors():
        found = _read(script)
    if as_json:
        print_json(_as_dict(found))
    else:
        _print_script(found)


def _verify(
    pair: tuple[Path, Path], num_updates: int, arguments: tuple[str, ...], *, as_json: bool
) -> None:
    """Run two scripts and print how far they agree."""
    from accel_fn.contrib.migrate.verify import verify

    with one_line_errors(), interruptible(), at_work("...") as show:

        def say(text: str) -> None:
            show(f"running {text}")

        results = verify(*pair, arguments, num_updates, say)
    if as_json:
        print_json([{**asdict(each), "holds": each.holds} for each in results])
    else:
        for each in results:
            _print_result(each)
    sys.exit(not all(each.holds for each in results))


def _print_result(result: Result) -> None:
    if not result.difference:
        click.echo(f"{result.what}: equal in {result.num_equal} updates")
        return
    if result.is_compared:
        click.echo(f"{result.what}: equal in {result.num_equal} updates, then differs")
    else:
        click.echo(f"{result.what}:")
    click.echo(wrapped(_INDENT, result.difference))
    click.echo(wrapped(_INDENT, result.explanation or "differs, unexplained"))


def _read(path: Path) -> Script:
    try:
        from accel_fn.contrib.migrate.read import read_script
    except ModuleNotFoundError as error:
        raise ExtraError(
            "migrate: libcst must be installed to read a script; in a clone of accel_fn: "
            'pip install ".[migrate]"',
            name=error.name,
        ) from None
    return read_script(path)


def _as_dict(script: Script) -> dict[str, object]:
    return {
        "lines": [{**asdict(line), "goes": line.goes} for line in script.lines],
        "recipe": script.recipe,
        "loops": [asdict(loop) for loop in script.loops],
        "num_lines": script.num_lines,
        "num_going": script.num_going,
        "num_replaced": script.num_replaced,
    }


def _print_script(script: Script) -> None:
    reasons: set[str] = set()
    rows: set[int] = set()
    for line in script.lines:
        _print_line(line, reasons, rows)
    for loop in script.loops:
        _print_loop(loop)
    if not script.loops:
        click.echo("The recipe that follows:\n")
        for text in _recipe(script.recipe):
            click.echo(f"{_INDENT}{text}")
        click.echo()
    click.echo(
        f"{script.num_going} of {script.num_lines} lines go, {script.num_replaced} are replaced."
    )
    unknown = dict.fromkeys(
        f"{use.name} (line {line.number})"
        for line in script.lines
        for use in line.uses
        if not use.is_known
    )
    if unknown:
        click.echo(wrapped("Not known, so look them up: ", ", ".join(unknown)))
    if rows:
        click.echo(f"Rows are those of {_PAGE}.")


def _print_line(line: Line, reasons: set[str], rows: set[int]) -> None:
    """Print a line and its replacements, with reasons and rows that were not printed before."""
    click.echo(f"{line.number:>4}  {_cut(line.source)}")
    if line.goes:
        click.echo(f"{_INDENT}-> (goes)")
    for use in line.uses:
        if not line.goes:
            for text in _replacements(use):
                click.echo(text)
        if use.why and use.why not in reasons:
            click.echo(wrapped(_INDENT, use.why))
            reasons.add(use.why)
        for number in use.differences:
            if number not in rows:
                difference = DIFFERENCES[number]
                text = f"{difference.what}: {difference.measured}"
                click.echo(wrapped(f"{_INDENT}row {number}: ", text))
                rows.add(number)
    click.echo()


def _print_loop(loop: Loop) -> None:
    """Print the code that replaces a loop, and the work that is left to do by hand."""
    click.echo(f"For the backward in line {loop.number}, below line {loop.after}:\n")
    click.echo(textwrap.indent(loop.program, _INDENT))
    click.echo("\nIn its loop, for the lines from the forward to the update:\n")
    click.echo(textwrap.indent(loop.in_loop, _INDENT))
    click.echo()
    for each in loop.by_hand:
        click.echo(wrapped("By hand: ", each))
    if loop.by_hand:
        click.echo()


def _recipe(transforms: list[str]) -> list[str]:
    one = f"recipe = af.compose({', '.join(transforms)})"
    if len(_INDENT + one) <= _COLUMNS:
        return [one]
    return ["recipe = af.compose(", *[f"    {each}," for each in transforms], ")"]


def _cut(source: str) -> str:
    room = _COLUMNS - len(_INDENT)
    return source if len(source) <= room else f"{source[: room - 3]}..."


def _replacements(use: Use) -> list[str]:
    """Return the lines that print a name's replacement, wrapped at 80 columns.

    The list is empty if the line of the script stays unchanged.
    """
    replacement = "(goes)" if use.replacement is None else use.replacement
    texts = replacement.splitlines() if use.is_known else ["(not known)"]
    part = f"{use.part} " if use.part else ""
    return [_filled(f"{part}-> {text}") for text in texts]


def _filled(text: str) -> str:
    return textwrap.fill(
        text,
        _COLUMNS,
        initial_indent=_INDENT,
        subsequent_indent=f"{_INDENT}   ",
        break_long_words=False,
        break_on_hyphens=False,
    )
