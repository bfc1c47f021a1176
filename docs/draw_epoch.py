"""Draws docs/_static/epoch.svg: how a real epoch is cut. `python docs/draw_epoch.py` writes it anew."""

from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af

PICTURE = Path(__file__).parent / "_static" / "epoch.svg"
NUM_SAMPLES, BATCH_SIZE, WORLD_SIZE, NUM_MICROBATCHES = 23, 8, 2, 2
CELL, NARROW, WIDE, LEFT, TOP, ROW = 26, 6, 32, 150, 16, 44
RANKS = ("#3f6ea3", "#a85a00")
STYLE = (
    "<style>.card{fill:#f5f6f8} .ink{fill:#1d2330} "
    "@media (prefers-color-scheme: dark){.card{fill:#1b1f26} .ink{fill:#e8ebf0}}</style>"
)


def draw() -> str:
    """The picture as SVG: every number in it comes from the loader."""
    data = TensorDataset(torch.arange(NUM_SAMPLES))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    ranks = [
        af.shard_loader(loader, af.DistState(rank=rank, world_size=WORLD_SIZE))
        for rank in range(WORLD_SIZE)
    ]
    batches = [ranks[0].global_indices(0, batch).tolist() for batch in range(len(ranks[0]))]
    parts = [[rank.indices(0, batch).tolist() for rank in ranks] for batch in range(len(batches))]
    drawn = [
        *row(0, "data set", [[(range(NUM_SAMPLES), "#bbbbbb")]]),
        *row(1, "order of epoch 0", [[([i for batch in batches for i in batch], "#dddddd")]]),
        *row(2, "global batches", [[(batch, "#dddddd")] for batch in batches]),
        *row(3, "a part for each rank", [list(zip(part, RANKS, strict=True)) for part in parts]),
        *row(4, "micro-batches", [cut(part) for part in parts]),
    ]
    width, height = LEFT + NUM_SAMPLES * CELL + 3 * WIDE, TOP + 6 * ROW
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" font-family="sans-serif" font-size="12">',
            STYLE,
            f'<rect class="card" width="{width}" height="{height}" rx="12"/>',
            *drawn,
            *legend(TOP + 5 * ROW + 18),
            "</svg>\n",
        ]
    )


def cut(part):
    """Each rank's part in micro-batches, as `accumulate` cuts it."""
    return [
        (piece.tolist(), colour)
        for samples, colour in zip(part, RANKS, strict=True)
        for piece in torch.tensor(samples).tensor_split(NUM_MICROBATCHES)
    ]


def row(line, title, groups):
    """One line of the picture: groups with a wide gap between them, runs of samples with a narrow one."""
    y = TOP + line * ROW
    drawn = [text(12, y + 17, title)]
    for place, group in enumerate(groups):
        x = LEFT + place * (BATCH_SIZE * CELL + WIDE)
        for samples, colour in group:
            for sample in samples:
                ink = 'fill="#ffffff"' if colour in RANKS else 'fill="#1d2330"'
                drawn += [cell(x, y, colour), text(x + CELL / 2 - 1, y + 16, sample, ink, "middle")]
                x += CELL
            x += NARROW
    return drawn


def legend(y):
    """Return the colour of a rank."""
    names = [f"rank {rank}" for rank in range(WORLD_SIZE)]
    drawn = []
    for place, (name, colour) in enumerate(zip(names, RANKS, strict=True)):
        x = LEFT + place * 90
        drawn += [cell(x, y - 17, colour), text(x + CELL + 4, y, name)]
    return drawn


def cell(x, y, colour):
    """A sample."""
    side = CELL - 2
    return f'<rect x="{x}" y="{y}" width="{side}" height="{side}" rx="3" fill="{colour}"/>'


def text(x, y, content, ink='class="ink"', anchor="start"):
    """A word or a number at a place."""
    return f'<text x="{x}" y="{y}" {ink} text-anchor="{anchor}">{content}</text>'


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw())
