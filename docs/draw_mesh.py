"""Draws docs/_static/mesh.svg: what each of four ranks holds. `python docs/draw_mesh.py` writes it anew."""

from pathlib import Path

import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate

PICTURE = Path(__file__).parent / "_static" / "mesh.svg"
MESH = {"dp": 2, "tp": 2}
NUM_ROWS, WIDTH, HIDDEN = 8, 4, 8
CELL, CARD, HEIGHT, GAP, LEFT, TOP = 11, 276, 156, 40, 24, 58
GREEN, BLUE, ORANGE = "#1b8a5a", "#3f6ea3", "#a85a00"
STYLE = (
    "<style>.card{fill:#f5f6f8} .box{fill:#fff;stroke:#aab2bf} .ink{fill:#1d2330} .soft{fill:#556070} "
    ".ghost{fill:none;stroke:#aab2bf} .line{stroke:#7b8594;stroke-width:1.6} .tip{fill:#7b8594} "
    "@media (prefers-color-scheme: dark){.card{fill:#1b1f26} .box{fill:#262c36;stroke:#566072} "
    ".ink{fill:#e8ebf0} .soft{fill:#a9b3c1} .ghost{stroke:#566072} .line{stroke:#8792a2} .tip{fill:#8792a2}}"
    "</style>"
)


def held(state):
    """Return what a rank holds: rows of the batch, and elements of two weights by number."""
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(torch.arange(layer.weight.numel()).view_as(layer.weight))
    plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))
    recipe = af.compose(af.wrap_ddp(), af.wrap_tp({"0": "colwise", "2": "rowwise"}))
    af.build(recipe(plan), state)
    rows = af.shard_batch(torch.arange(NUM_ROWS), state)
    up, down = (layer.weight.to_local().flatten().int() for layer in (model[0], model[2]))
    return {axis.name: axis.rank for axis in state.axes}, rows, up, down


def loss_fn(model, batch):
    """The plan needs one; it is not called."""
    raise NotImplementedError


def draw() -> str:
    """The picture as SVG: every filled cell is one that the rank holds."""
    width, height = 2 * (LEFT + CARD) + GAP, TOP + 2 * HEIGHT + GAP + 46
    cards = [card(rank, *found) for rank, found in enumerate(simulate(held, mesh=MESH))]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" font-family="system-ui, sans-serif" font-size="13">',
            STYLE,
            f'<rect class="card" width="{width}" height="{height}" rx="12"/>',
            text(LEFT, 26, "A batch of 8 rows and two layers on a mesh of dp 2 x tp 2"),
            text(LEFT, 46, "filled: on this rank", "soft"),
            *(each for drawn in cards for each in drawn),
            *arrows(),
            "</svg>\n",
        ]
    )


def card(rank, place, rows, up, down):
    """Draw a rank: its rows, and its parts of both matrices in the order of the product."""
    x, y = LEFT + place["tp"] * (CARD + GAP), TOP + place["dp"] * (HEIGHT + GAP)
    colour = (BLUE, ORANGE)[place["tp"]]
    middle = y + 78
    # A weight is [outputs, inputs]; here a column is an output.
    columns = {(i % WIDTH, i // WIDTH) for i in up.tolist()}
    lines = {(i % HIDDEN, i // HIDDEN) for i in down.tolist()}
    whole_rows = {(row, column) for row in rows.tolist() for column in range(WIDTH)}
    return [
        f'<rect class="box" x="{x}" y="{y}" width="{CARD}" height="{HEIGHT}" rx="8"/>',
        text(x + 12, y + 20, f"rank {rank}: dp {place['dp']}, tp {place['tp']}"),
        *matrix(x + 26, middle, NUM_ROWS, WIDTH, whole_rows, GREEN),
        *matrix(x + 96, middle, WIDTH, HIDDEN, columns, colour),
        *matrix(x + 208, middle, HIDDEN, WIDTH, lines, colour),
        *(text(x + right, middle + 4, "&#215;", "ink", "middle") for right in (83, 196)),
        text(x + 48, y + 142, "batch", "soft", "middle"),
        text(x + 140, y + 142, "colwise", "soft", "middle"),
        text(x + 230, y + 142, "rowwise", "soft", "middle"),
    ]


def matrix(x, middle, num_lines, num_columns, filled, colour):
    """Draw cells, of which some are filled, around the height `middle`."""
    top, side = middle - num_lines * CELL / 2, CELL - 2
    every = {(line, column) for line in range(num_lines) for column in range(num_columns)}
    return [
        f'<path {ink} d="{" ".join(squares)}"/>'
        for ink, cells in (('class="ghost"', every - filled), (f'fill="{colour}"', filled))
        for squares in [
            [
                f"M{x + column * CELL} {top + line * CELL:g}h{side}v{side}h-{side}z"
                for line, column in sorted(cells)
            ]
        ]
    ]


def arrows():
    """Draw what ranks along each axis exchange."""
    between = TOP + HEIGHT
    drawn = []
    for place in range(2):
        x, y = LEFT + CARD / 2 + place * (CARD + GAP), TOP + HEIGHT / 2 + place * (HEIGHT + GAP)
        drawn += [
            arrow(x, between + 4, x, between + GAP - 4),
            arrow(LEFT + CARD + 4, y, LEFT + CARD + GAP - 4, y),
            text(x + 12, between + GAP / 2 + 4, "dp", "soft"),
            text(LEFT + CARD + GAP / 2, y - 10, "tp", "soft", "middle"),
        ]
    sent = "along tp: activations, in each block; along dp: gradients, once a step"
    return [*drawn, text(LEFT, TOP + 2 * HEIGHT + GAP + 28, sent, "soft")]


def arrow(x1, y1, x2, y2):
    """Draw a line with a tip at both ends."""
    dx, dy = (5, 0) if x1 != x2 else (0, 5)
    tips = [
        f"{x:g},{y:g} {x + s * dx + dy * 0.7:g},{y + s * dy + dx * 0.7:g} "
        f"{x + s * dx - dy * 0.7:g},{y + s * dy - dx * 0.7:g}"
        for x, y, s in ((x1, y1, 1), (x2, y2, -1))
    ]
    line = f'<path class="line" d="M{x1 + dx:g} {y1 + dy:g} L{x2 - dx:g} {y2 - dy:g}"/>'
    return line + "".join(f'<polygon class="tip" points="{each}"/>' for each in tips)


def text(x, y, content, ink="ink", anchor="start"):
    """Some words at a place."""
    return f'<text x="{x:g}" y="{y:g}" class="{ink}" text-anchor="{anchor}">{content}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw())
