"""The command `report`: print the time of a run by category, or compare runs."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from accel_fn.cli.output import (
    json_option,
    one_line_errors,
    print_json,
    print_table,
    readable_bytes,
    readable_seconds,
    runs_argument,
)
from accel_fn.contrib.runs.goodput import CATEGORIES, Goodput, goodput
from accel_fn.contrib.runs.run_log import Run, read_runs
from accel_fn.errors import ArgumentError, message

_BAR = 16
_OWN = ("run", "step", "goodput", "time", "samples/s", "restarts", "skipped")


@dataclass(frozen=True)
class _Summary:
    """One run, as a report prints it."""

    run: Run
    spent: Goodput

    @property
    def restarts(self) -> int:
        return max(self.spent.processes - 1, 0)

    @property
    def skipped(self) -> int:
        columns = self.run.of_plans("skipped_updates")
        return int(sum(each for column in columns for each in column.values if math.isfinite(each)))

    @property
    def speed(self) -> float | None:
        """Return the median of the samples per second; with several plans, of the first plan."""
        columns = self.run.of_plans("samples_per_second")
        return median(columns[0].values) if columns else None

    def cell(self, name: str) -> Any:
        """Return the value of a column in the table of runs: a text, a number, or None."""
        own = {
            "run": self.run.name,
            "step": self.run.last_step,
            "goodput": self.spent.share,
            "time": self.spent.wall / 1e6,
            "samples/s": self.speed,
            "restarts": self.restarts,
            "skipped": self.skipped,
        }
        column = self.run.columns.get(name)
        return own[name] if name in own else column and column.values[-1]

    def as_dict(self) -> dict[str, object]:
        return {
            "run": self.run.name,
            "step": self.run.last_step,
            "restarts": self.restarts,
            "skipped_updates": self.skipped,
            "goodput": self.spent.share,
            "wall_seconds": self.spent.wall / 1e6,
            "paused_seconds": self.spent.paused / 1e6,
            "seconds": {name: spent / 1e6 for name, spent in self.spent.microseconds.items()},
            "last_values": {name: each.values[-1] for name, each in self.run.columns.items()},
        }


@click.command(epilog="Example: accel-fn report runs/* --sort loss")
@runs_argument()
@click.option("--sort", metavar="COLUMN", help="Sort runs by a column or by a value's name.")
@click.option("--descending", is_flag=True, help="Sort from high to low.")
@click.option("--column", "added", metavar="NAME", multiple=True, help="Show this value as well.")
@json_option()
def report(
    *,
    paths: tuple[Path, ...],
    sort: str | None,
    descending: bool,
    added: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print the goodput of a run, or compare runs in a table.

    RUN is a folder with a log that af.log_to wrote, or the log itself. Goodput is the share of wall
    time that went into updates that count, over all restarts.
    """
    if descending and sort is None:
        raise click.UsageError("--descending needs --sort COLUMN")
    chosen = [("column", name) for name in added]
    if sort is not None:
        chosen.append(("sort", sort))
    with one_line_errors():
        runs, without = read_runs("report", paths)
        names = list(dict.fromkeys(name for run in runs for name in run.columns if name != "time"))
        for option, name in chosen:
            _check_column(option, name, [*_OWN, *names])
    found = [_Summary(run, goodput(run)) for run in runs]
    for path in without:
        click.echo(f"report: no log in {path}", err=True)
    if sort is not None:
        found = _sorted(found, sort, descending)
    if as_json:
        print_json([each.as_dict() for each in found])
    elif len(found) == 1 and not added:
        _print_run(found[0])
    else:
        columns = _columns(names, [name for _, name in chosen])
        rows = [[_shown(name, each.cell(name)) for name in columns] for each in found]
        print_table(columns, rows)


def _check_column(option: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        repair = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
        rule = "be a column of the table or a value that a run has logged"
        raise ArgumentError(message("report", option, rule, name, repair))


def _columns(names: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """Return the headings of the table of runs; `names` are those of all values that the runs logged."""
    losses = [name for name in names if name == "loss" or name.endswith("/loss")]
    # Show only one loss, so that the table fits 80 columns.
    return list(
        dict.fromkeys(["run", "step", *losses[:1], *chosen, "goodput", "time", "samples/s"])
    )


def _sorted(found: list[_Summary], name: str, descending: bool) -> list[_Summary]:
    """Sort by a column; runs without a value, or with nan, come last."""
    missing = [each for each in found if _is_missing(each.cell(name))]
    known = [each for each in found if not _is_missing(each.cell(name))]
    return sorted(known, key=lambda each: each.cell(name), reverse=descending) + missing


def _is_missing(value: Any) -> bool:
    return value is None or value != value


def _shown(name: str, value: Any) -> str:
    """Format a value in the unit of its column."""
    if value is None:
        return "-"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if name == "goodput":
        return f"{100 * value:.1f}%"
    if name == "time":
        return readable_seconds(value)
    if name.endswith("peak_memory"):
        return readable_bytes(int(value))
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"


def _print_run(found: _Summary) -> None:
    """Print the run's restarts, its time by category, and its values."""
    run, spent = found.run, found.spent
    counts = [_count(run.last_step, "step"), _count(found.restarts, "restart")]
    if run.of_plans("skipped_updates"):
        counts.append(_count(found.skipped, "skipped update"))
    print(f"{run.name}: {', '.join(counts)}")
    if spent.wall:
        shares = dict(zip(spent.microseconds, _shares([*spent.microseconds.values()]), strict=True))
        share, wall = _percent(shares["updates"]), readable_seconds(spent.wall / 1e6)
        print(f"goodput {share}: that share of {wall} went into updates that count\n")
        if spent.paused:
            paused = readable_seconds(spent.paused / 1e6)
            print(
                f"paused {paused} between processes that had ended and later ones, which is not counted\n"
            )
        print_table(["time", "share", "length", "", ""], [*_parts(spent, shares)])
    names = [name for name in run.columns if name != "time"]
    if names:
        print()
        print_table(
            ["value", "last", "median", "lowest", "highest"], [_row(run, each) for each in names]
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _parts(spent: Goodput, shares: dict[str, int]) -> Iterator[list[str]]:
    for name, microseconds in spent.microseconds.items():
        bar = "█" * round(_BAR * microseconds / spent.wall)
        length = readable_seconds(microseconds / 1e6)
        yield [name, _percent(shares[name]).rjust(6), length, bar, CATEGORIES[name]]


def _percent(tenths: int) -> str:
    return f"{tenths // 10}.{tenths % 10}%"


def _shares(parts: Sequence[int]) -> list[int]:
    """Return tenths of a percent that sum to 1000; the largest remainders round up."""
    whole = sum(parts)
    found = [1000 * part // whole for part in parts]
    by_rest = sorted(range(len(parts)), key=lambda place: -(1000 * parts[place] % whole))
    for place in by_rest[: 1000 - sum(found)]:
        found[place] += 1
    return found


def _row(run: Run, name: str) -> list[str]:
    values = run.columns[name].values
    finite = [value for value in values if math.isfinite(value)] or values
    cells = (values[-1], median(finite), min(finite), max(finite))
    return [name, *(_shown(name, float(each)) for each in cells)]
