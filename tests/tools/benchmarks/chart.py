"""Draws the chart of the ratios as SVG: a line for each scenario, a mark for each loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.tools.benchmarks.results import Row, Table

COLOURS = {
    "accelerate": "#a85a00",
    "Fabric": "#7b8594",
    "accel_fn compiled": "#2a8f7a",
    "accel_fn": "#5a4fcf",
}
"""The loops that are drawn, beside the base."""
WIDTH, LEFT, RIGHT, TOP, LINE = 640, 296, 616, 84, 24
LARGEST = 2.25
STYLE = """<style>
  .card{fill:#f5f6f8} .ink{fill:#1d2330} .soft{fill:#556070} .grid{stroke:#d5d9e0} .one{stroke:#556070}
  @media (prefers-color-scheme: dark){
    .card{fill:#1b1f26} .ink{fill:#e8ebf0} .soft{fill:#a9b3c1} .grid{stroke:#39414e} .one{stroke:#a9b3c1}
  }
</style>"""


def draw_chart(tables: Iterable[Table]) -> str:
    """Draw the ratios of tables that have all peers; whiskers are quartiles."""
    drawn = [
        table for table in tables if {"accelerate", "Fabric"} <= {row.name for row in table.rows}
    ]
    height = TOP + LINE * len(drawn) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="CPU time per update, as a ratio to the loop by hand" '
        'font-family="system-ui, sans-serif" font-size="13">',
        STYLE,
        f'<rect class="card" width="{WIDTH}" height="{height}" rx="12"/>',
        '<text class="ink" x="20" y="28">CPU time per update; 1.0 is the loop by hand, less is better</text>',
        *legend(),
        *axis(height - 16),
    ]
    for place, table in enumerate(drawn):
        parts += line_of(table, TOP + LINE * place + LINE / 2)
    return "\n".join([*parts, "</svg>\n"])


def legend() -> Iterator[str]:
    """Yield a mark and a name for each loop."""
    for place, (name, colour) in enumerate(COLOURS.items()):
        x = 26 + place * 120 + (place > 2) * 50
        yield f'<circle cx="{x}" cy="48" r="5.5" fill="{colour}"/>'
        yield f'<text class="soft" x="{x + 11}" y="52.5">{name}</text>'


def axis(bottom: float) -> Iterator[str]:
    """Yield lines at round ratios, the one at 1.0 darker."""
    for ratio in (0.0, 0.5, 1.0, 1.5, 2.0):
        kind = "one" if ratio == 1 else "grid"
        yield f'<path class="{kind}" d="M{at(ratio):.1f} {TOP} V{bottom}"/>'
        yield (
            f'<text class="soft" x="{at(ratio):.1f}" y="{TOP - 6}" font-size="11" '
            f'text-anchor="middle">{ratio:.1f}</text>'
        )


def line_of(table: Table, y: float) -> Iterator[str]:
    """Yield the name of a scenario and its marks, accel_fn's last, on top."""
    yield f'<text class="ink" x="20" y="{y + 4.5:.1f}" font-size="12">{table.name}</text>'
    for row in table.rows:
        if row.name in COLOURS and not row.note:
            yield mark(table.name, row, y)


def mark(name: str, row: Row, y: float) -> str:
    """Return a dot at the median, with a line from quartile to quartile."""
    lower, median, upper = row.cpu_ratio
    colour = COLOURS[row.name]
    return (
        f"<g><title>{name}: {row.name} {median:.2f}</title>"
        f'<path stroke="{colour}" stroke-width="2.5" d="M{at(lower):.1f} {y:.1f} H{at(upper):.1f}"/>'
        f'<circle cx="{at(median):.1f}" cy="{y:.1f}" r="5.5" fill="{colour}"/></g>'
    )


def at(ratio: float) -> float:
    """Return the place of a ratio on the axis."""
    return LEFT + (RIGHT - LEFT) * min(ratio, LARGEST) / LARGEST
