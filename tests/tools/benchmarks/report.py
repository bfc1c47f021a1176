"""Formats tables as Markdown, the summary of the targets, and the page that holds them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tests.tools.benchmarks.importing import TARGET_MS, ImportCost
from tests.tools.benchmarks.results import Row, Table

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def render_table(table: Table) -> str:
    several = table.name.startswith("two ranks")
    head = ["", f"{table.clock} us", "ratio", "quartiles", "calls", "operations", "target"]
    if several:
        head[6:6] = ["wall us", "wall ratio"]
    return _markdown(head, [[row.name, *_figures(row, several)] for row in table.rows])


def render_overview(tables: Iterable[Table]) -> str:
    """List the ratios of all tables with the same variants, a line each; one list per base."""
    by_variants: dict[tuple[str, ...], list[list[str]]] = {}
    for table in tables:
        base, *others = table.rows
        ratios = [row.note or f"{row.cpu_ratio[1]:.2f}" for row in others]
        line = [table.name, f"{base.cpu_us:,.0f} us", *ratios]
        by_variants.setdefault(tuple(row.name for row in table.rows), []).append(line)
    return "\n\n".join(_markdown(["", *names], lines) for names, lines in by_variants.items())


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    """Format a table with columns that are aligned in the source; the first is aligned to the
    left."""
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join(
        "| " + " | ".join(_aligned(line, widths)) + " |" for line in [head, rule, *lines]
    )


def _figures(row: Row, several: bool) -> list[str]:
    if row.note:
        return [row.note, *[""] * (7 if several else 5)]
    lower, median, upper = row.cpu_ratio
    figures = [f"{row.cpu_us:,.0f}", f"{median:.3f}", f"{lower:.3f} - {upper:.3f}"]
    figures += ["" if each is None else f"{each:.0f}" for each in (row.calls, row.ops)]
    if several:
        figures += [f"{row.wall_us:,.0f}", f"{row.wall_ratio[1]:.3f}"]
    return [*figures, row.aim]


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *rest = zip(cells, widths, strict=True)
    return [first[0].ljust(first[1]), *[cell.rjust(width) for cell, width in rest]]


def summarize(tables: Iterable[Table], imported: ImportCost | None) -> str:
    rows = [(table.name, row) for table in tables for row in table.rows if row.target is not None]
    lines = [
        f"- {sum(row.verdict == verdict for _, row in rows)} of {len(rows)} targets {verdict}"
        + "".join(
            f"\n  - {name}: {row.cpu_ratio[1]:.3f}, target {row.target:.2f}"
            for name, row in rows
            if row.verdict == verdict != "met"
        )
        for verdict in ("met", "within noise", "missed")
        if any(row.verdict == verdict for _, row in rows)
    ]
    if imported:
        verdict = "met" if imported.package_ms < TARGET_MS else "missed"
        lines.append(
            f"- import: {imported.package_ms:.1f} ms, target {TARGET_MS:.0f} ms: {verdict}"
        )
    return "\n".join(lines)


def describe_import(imported: ImportCost) -> str:
    torch_too = "imports" if imported.brings_torch else "does not import"
    head = ["CPU time on top of `import torch`", "ms"]
    lines = [
        [f"`import accel_fn`, which {torch_too} torch by itself", f"{imported.package_ms:.1f}"],
        ["`from accel_fn import *`, after an optimizer of torch", f"{imported.names_ms:.0f}"],
        [
            "the first optimizer of torch, which imports its compiler, DTensor and FSDP",
            f"{imported.optimizer_ms:.0f}",
        ],
    ]
    return _markdown(head, lines)


PARTS = {
    "two ranks": "Two ranks",
    "data": "Data",
    "checkpoint": "Checkpoints",
    "start": "Starts",
    "tiny": "Transforms",
    "middle": "Transforms",
}
"""Kinds of tables, by the first word of their first line."""


def title_of(tables: Sequence[Table]) -> str:
    """Return the title of an overview of tables with the same variants: their kind and the base."""
    first = tables[0]
    kind = next(title for word, title in PARTS.items() if first.name.startswith(word))
    return f"{kind} (1.0 is {first.rows[0].name})"


def span(tables: Sequence[Table], model: str, loop: str) -> str:
    """Return the smallest and the largest ratio of a loop over the tables of one model."""
    rows = [row for table in tables if table.name.startswith(model) for row in table.rows]
    ratios = [row.cpu_ratio[1] for row in rows if row.name == loop]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def render_lead(tables: Sequence[Table]) -> str:
    """Return the figures in two sentences."""
    peers = " and ".join(
        f"{each} takes {span(tables, 'tiny', each)}" for each in ("Fabric", "accelerate")
    )
    return (
        f"On the CPU, a step of the small model takes {span(tables, 'tiny', 'accel_fn')} of the time "
        f"of the loop by hand, and one of the middle model {span(tables, 'middle', 'accel_fn')}. "
        f'With `compiled(scope="step")`, the small model takes '
        f"{span(tables, 'tiny', 'accel_fn compiled')}. There, {peers}."
    )


def render_page(
    tables: Sequence[Table], imported: ImportCost | None, rounds: int, commit: str
) -> str:
    """Return the text between the markers: chart, main table, and the other tables folded."""
    disturbed = sum(table.disturbed for table in tables) / len(tables)
    conditions = (
        f"Commit {commit}, torch {torch.__version__}, {os.cpu_count()} CPUs, {rounds} rounds; other "
        f"processes disturbed {disturbed:.0%} of the blocks. Dots are medians, lines quartiles."
    )
    alike: dict[tuple[str, ...], list[Table]] = {}
    for table in tables:
        alike.setdefault(tuple(row.name for row in table.rows), []).append(table)
    lead = render_lead(next(iter(alike.values())))
    main, *rest = alike.values()
    chart = "![CPU time per update, as ratios to the loop by hand](_static/benchmarks.svg)"
    head = "CPU time per update of the loop by hand, and the ratios of the others to it:"
    folded = [(title_of(each), render_overview(each)) for each in rest]
    if imported:
        folded.append(("Import", describe_import(imported)))
    parts = [
        f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>" for title, text in folded
    ]
    return "\n\n".join([lead, chart, conditions, head, render_overview(main), *parts])


def write_page(path: Path, text: str, chart: str) -> None:
    """Replace the text between the markers of a page, and the chart beside it."""
    before, rest = path.read_text().split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
    (path.parent / "_static" / "benchmarks.svg").write_text(chart)
