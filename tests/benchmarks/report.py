"""Tables as Markdown, the summary of the targets, and the page that holds them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tests.benchmarks.importing import TARGET_MS, ImportCost
from tests.benchmarks.results import Row, Table

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def render_table(table: Table) -> str:
    several = table.name.startswith("two ranks")
    head = ["", f"{table.clock} us", "ratio", "quartiles", "target"]
    if several:
        head[4:4] = ["wall us", "wall ratio"]
    return _markdown(head, [[row.name, *_figures(row, several)] for row in table.rows])


def render_overview(tables: Iterable[Table]) -> str:
    """The ratios of all tables with the same variants, a line each; one such list per base."""
    by_variants: dict[tuple[str, ...], list[list[str]]] = {}
    for table in tables:
        base, *others = table.rows
        ratios = [row.note or f"{row.cpu_ratio[1]:.2f}" for row in others]
        line = [table.name, f"{base.cpu_us:,.0f} us", *ratios, table.rows[-1].aim]
        by_variants.setdefault(tuple(row.name for row in table.rows), []).append(line)
    return "\n\n".join(
        _markdown(["", *names, "target"], lines) for names, lines in by_variants.items()
    )


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    """A table whose columns are aligned in the source too: the first to the left."""
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join(
        "| " + " | ".join(_aligned(line, widths)) + " |" for line in [head, rule, *lines]
    )


def _figures(row: Row, several: bool) -> list[str]:
    if row.note:
        return [row.note, *[""] * (5 if several else 3)]
    lower, median, upper = row.cpu_ratio
    figures = [f"{row.cpu_us:,.0f}", f"{median:.3f}", f"{lower:.3f} - {upper:.3f}"]
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
    return "\n".join([*lines, *([describe_import(imported)] if imported else [])])


def describe_import(imported: ImportCost) -> str:
    verdict = "met" if imported.package_ms < TARGET_MS else "missed"
    torch_too = "imports" if imported.brings_torch else "does not import"
    return (
        f"- `import accel_fn` adds {imported.package_ms:.1f} ms to `import torch` "
        f"(target {TARGET_MS:.0f} ms: {verdict}) and {torch_too} torch by itself; "
        f"all of its names but `launch` add {imported.names_ms:.1f} ms, most of that torch's FSDP"
    )


def render_page(tables: Sequence[Table], imported: ImportCost | None, rounds: int) -> str:
    """The part of the page between its markers."""
    disturbed = sum(table.disturbed for table in tables) / len(tables)
    conditions = (
        f"torch {torch.__version__}, {os.cpu_count()} CPUs, {rounds} rounds; "
        f"other processes disturbed {disturbed:.0%} of the blocks. CPU time per update by hand, "
        "and the ratios to it:"
    )
    parts = [conditions, render_overview(tables), summarize(tables, imported)]
    parts += [f"### {table.name}\n\n{render_table(table)}" for table in tables]
    return "\n\n".join(parts)


def write_page(path: Path, text: str) -> None:
    """Replace what is between the markers of a page; the rest stays."""
    before, rest = path.read_text().split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
