"""Draws docs/_static/sequence.svg: tokens by rank along cp. `python docs/draw_sequence.py` writes it anew."""

from pathlib import Path

import torch
import torch.nn.functional as F
from draw_mesh import CELL, STYLE, matrix, text
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate

PICTURE = Path(__file__).parent / "_static" / "sequence.svg"
WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "saw", "a", "dog", "run", "away"]
NUM_RANKS = 3
TOKEN, CARD, LEFT, TOP, GAP = 60, 148, 24, 62, 14
COLOURS = "#1b8a5a", "#3f6ea3", "#a85a00"


class Watched(nn.Module):
    """Causal attention in which the value of a token is its place, so that outputs show what was seen."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen = {}

    def forward(self, batch):
        """Return what each query attends to, and note it in `seen`."""
        places = batch["position_ids"]
        values = self.scale * F.one_hot(places, len(WORDS)).float()[:, None]
        zeros = torch.zeros(*values.shape[:-1], 1)
        mixed = F.scaled_dot_product_attention(zeros, zeros, values, is_causal=True)
        self.seen = {
            query: row.nonzero().flatten().tolist()
            for query, row in zip(places[0].tolist(), mixed[0, 0], strict=True)
        }
        return mixed[:, 0]


def loss_fn(model, batch):
    """The mean over tokens of what the model returns."""
    return model(batch).sum(-1).mean()


def held(state):
    """Return the keys that each query of a rank sees, by the places of its tokens."""
    model, cut = Watched(), af.wrap_cp({"position_ids": 1})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = af.Plan(loss_fn, model, optimizer, lambda batch: float(batch["position_ids"].numel()))
    state, step = af.build(af.compose(af.wrap_ddp(), cut)(plan), state)
    batch = {"position_ids": torch.arange(len(WORDS))[None]}
    step.forward(state, batch)
    return model.seen


def draw() -> str:
    """The picture as SVG: every filled cell is a query of the rank and a key that it sees."""
    width = 2 * LEFT + 6 * TOKEN + 50 + len(WORDS) * CELL
    height = TOP + NUM_RANKS * (CARD + GAP) + 24
    ranks = simulate(held, mesh={"cp": NUM_RANKS})
    cards = [card(rank, seen, width) for rank, seen in enumerate(ranks)]
    title = f"A sequence of {len(WORDS)} tokens on a mesh of cp {NUM_RANKS}"
    below = "all other layers, and the loss: each rank computes its own tokens"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" font-family="system-ui, sans-serif" font-size="13">',
            STYLE,
            "<style>.lit{fill:#fff}</style>",
            f'<rect class="card" width="{width}" height="{height}" rx="12"/>',
            text(LEFT, 26, title),
            text(
                LEFT, 46, "filled: tokens of this rank, and the keys that its queries see", "soft"
            ),
            *(each for drawn in cards for each in drawn),
            text(LEFT, height - 14, below, "soft"),
            "</svg>\n",
        ]
    )


def card(rank, seen, width):
    """Draw a rank: its tokens in the sequence, and its rows of the causal attention."""
    x, y = LEFT, TOP + rank * (CARD + GAP)
    own, inner = sorted(seen), width - 2 * LEFT
    grid = x + inner - 12 - len(WORDS) * CELL
    cells = {(query, key) for query, keys in seen.items() for key in keys}
    places = ", ".join(map(str, own))
    return [
        f'<rect class="box" x="{x}" y="{y}" width="{inner}" height="{CARD}" rx="8"/>',
        text(x + 12, y + 22, f"rank {rank} along cp: tokens {places}"),
        *tokens(x + 12, y + 42, own, COLOURS[rank]),
        text(
            x + 12, y + 120, f"attention: queries {places}, {len(cells)} pairs with a key", "soft"
        ),
        *matrix(grid, y + CARD / 2, len(WORDS), len(WORDS), cells, COLOURS[rank]),
    ]


def tokens(x, y, own, colour):
    """Draw the words of the sequence in two lines, those of the rank filled."""
    drawn, half = [], len(WORDS) // 2
    for place, word in enumerate(WORDS):
        left, top = x + place % half * TOKEN, y + place // half * 24
        ink = f'fill="{colour}"' if place in own else 'class="ghost"'
        drawn += [
            f'<rect {ink} x="{left}" y="{top}" width="{TOKEN - 3}" height="20" rx="4"/>',
            text(
                left + TOKEN / 2 - 1.5, top + 14, word, "lit" if place in own else "soft", "middle"
            ),
        ]
    return drawn


if __name__ == "__main__":
    PICTURE.write_text(draw())
