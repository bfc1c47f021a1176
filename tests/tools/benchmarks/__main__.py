"""`python -m tests.tools.benchmarks`: run all scenarios, print progress, tables and a summary of the
targets."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # must be set before torch is imported

import argparse
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from tests.tools.benchmarks.chart import draw_chart
from tests.tools.benchmarks.comparing import compare
from tests.tools.benchmarks.conditions import settle
from tests.tools.benchmarks.importing import ImportCost, measure_import
from tests.tools.benchmarks.jobs import SCENARIOS, SCENARIOS_OF_TWO
from tests.tools.benchmarks.loading import MEASURES
from tests.tools.benchmarks.measuring import alone
from tests.tools.benchmarks.report import (
    describe_import,
    render_overview,
    render_page,
    render_table,
    summarize,
    write_page,
)
from tests.tools.benchmarks.results import Table
from tests.tools.benchmarks.saving import SIZES, compare_saving
from tests.tools.benchmarks.starting import START, compare_starting
from tests.tools.benchmarks.tasks import ALONE, IN_TWO_RANKS, Scenario
from tests.tools.benchmarks.worlds import compare_in_world

ROUNDS, QUICK_ROUNDS = 25, 3
PATIENCE_S = 4.0  # per scenario, for blocks that other processes disturbed
APART: dict[str, Callable[..., list[Table]]] = {
    **{name: partial(compare_saving, num_layers=count) for name, count in SIZES.items()},
    START: compare_starting,
}
"""Scenarios that are timed in processes of their own, and never repeated."""


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.benchmarks",
        description="The cost of a training step and of its data, with and without libraries.",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="blocks per variant")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds, no patience")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help='e.g. "tiny*clipping", "data", "import"'
    )
    parser.add_argument(
        "--write",
        nargs="?",
        type=Path,
        const=Path("docs/benchmarks.md"),
        metavar="PAGE",
        help="put chart and tables between the markers of this page",
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be >= 1, got {arguments.rounds}")
    if arguments.write is not None and arguments.only:
        parser.error("--write puts all tables into the page: leave out --only")
    return arguments


def main() -> int:
    arguments = read_arguments()
    rounds = QUICK_ROUNDS if arguments.quick else arguments.rounds
    patience_s = 0.0 if arguments.quick else PATIENCE_S
    settle()
    imported, tables = run(f"*{arguments.only}*", rounds, patience_s)
    if imported is None and not tables:
        print(f"--only {arguments.only!r} names no table", file=sys.stderr)
        return 2
    print(f"\n## All ratios\n\n{render_overview(tables)}\n\n## Targets\n")
    print(summarize(tables, imported))
    if arguments.write is not None:
        page = render_page(tables, imported, rounds, read_commit())
        write_page(arguments.write, page, draw_chart(tables))
    return 1 if any(row.is_faulty for table in tables for row in table.rows) else 0


def read_commit() -> str:
    """Return the short name of the commit that is measured."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(pattern: str, rounds: int, patience_s: float) -> tuple[ImportCost | None, list[Table]]:
    """Measure the scenarios that match the pattern, and print each as it ends."""
    imported = None
    if fnmatch("import", pattern):
        print("  import ...", flush=True)
        imported = measure_import(rounds)
        print(describe_import(imported))
    tables = []
    for scenario in chosen([*ALONE, *SCENARIOS], pattern):
        print(f"  {scenario.name} ...", flush=True)
        tables.append(compare(scenario, alone(), rounds, patience_s))
        show(tables[-1])
    for name, measure in MEASURES.items():
        if fnmatch(name, pattern):
            print(f"  {name} ...", flush=True)
            tables.append(measure(name, alone(), rounds, patience_s))
            show(tables[-1])
    for name, compare_apart in APART.items():
        if fnmatch(name, pattern):
            print(f"  {name} ...", flush=True)
            of_one = compare_apart(name, rounds=rounds)
            for table in of_one:
                show(table)
            tables += of_one
    in_world = chosen([*IN_TWO_RANKS, *SCENARIOS_OF_TWO], pattern)
    if in_world:
        of_world = compare_in_world(in_world, rounds, patience_s)
        for table in of_world:
            show(table)
        tables += of_world
    return imported, tables


def chosen(scenarios: list[Scenario], pattern: str) -> list[Scenario]:
    return [scenario for scenario in scenarios if fnmatch(scenario.name, pattern)]


def show(table: Table) -> None:
    differences = ", ".join(
        f"{row.name} {row.difference:.0e}" for row in table.rows if not row.note
    )
    print(f"\n### {table.name}\n\n{render_table(table)}\n")
    print(f"blocks disturbed by other processes: {table.disturbed:.0%}")
    print(f"largest difference, in updates or largest gradients: {differences}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
