"""Draws docs/_static/promise.svg: a training run on 1, 2 and 4 processes, by accelerate and by accel_fn.

`python docs/draw_promise.py` trains and writes it anew. Both libraries see the same batches of 8
answers, short and long ones as in a chat, and minimize the mean cross entropy of a token.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af

PICTURE = Path(__file__).parent / "_static" / "promise.svg"
SIZES, LIBRARIES = (1, 2, 4), ("accelerate", "accel_fn")
NUM_TOKENS, NUM_ANSWERS, LONGEST, BATCH_SIZE, NUM_PASSES = 16, 256, 64, 8, 2
WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 190, 56, 56, 44
LINES = {1: ("#3f6ea3", 7), 2: ("#e08a1e", 3.5), 4: ("#1b8a5a", 1.5)}
STYLE = (
    "<style>.card{fill:#f5f6f8} .ink{fill:#1d2330} .axis{stroke:#8a93a3} "
    "@media (prefers-color-scheme: dark){.card{fill:#1b1f26} .ink{fill:#e8ebf0}}</style>"
)


def answers():
    """Tokens that rise in short answers and fall in long ones, and the next token as the label."""
    generator = torch.Generator().manual_seed(0)
    is_long = torch.rand(NUM_ANSWERS, 1, generator=generator) < 0.25
    lengths = torch.where(is_long, LONGEST, 4)
    first = torch.randint(NUM_TOKENS, (NUM_ANSWERS, 1), generator=generator)
    place = torch.arange(LONGEST + 1)
    tokens = (first + torch.where(is_long, -1, 1) * place) % NUM_TOKENS
    labels = tokens[:, 1:].where(place[:-1] < lengths, -100)
    return TensorDataset(tokens[:, :-1], labels)


def loss_fn(model, batch):
    """Return the mean over the tokens that have a label."""
    tokens, labels = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def make():
    """A model, its optimizer and the loader of global batches: equal in every run."""
    torch.manual_seed(0)
    model = nn.Embedding(NUM_TOKENS, NUM_TOKENS)
    loader = DataLoader(answers(), BATCH_SIZE)
    return model, torch.optim.Adam(model.parameters(), lr=0.1), loader


def loss_of_all(model):
    """Return the same loss over the whole data set, which no division into batches changes."""
    with torch.no_grad():
        return loss_fn(model, answers().tensors).item()


def by_accelerate():
    """Train by the loop of accelerate's quick tour; return the loss over all tokens after each update."""
    from accelerate import Accelerator, DataLoaderConfiguration

    # By default a batch would be one rank's, so the global batch would grow with the number of ranks.
    split = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=split)
    model, *others = make()
    wrapped, optimizer, loader = accelerator.prepare(model, *others)
    losses = []
    for _ in range(NUM_PASSES):
        for batch in loader:
            accelerator.backward(loss_fn(wrapped, batch))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss_of_all(model))
    return accelerator.num_processes, losses


def by_accel_fn():
    """Train by a plan whose loss is a mean over labels; return the loss after each update."""
    model, optimizer, loader = make()
    plan = af.Plan(loss_fn, model, optimizer, weight_fn=af.count_labels(1))
    state, step = af.build(af.wrap_ddp()(plan), af.init())
    losses = []
    for epoch in af.shard_loader(loader, state).epochs(NUM_PASSES):
        for batch in epoch:
            state, _ = step(state, batch)
            losses.append(loss_of_all(model))
    return state.world_size, losses


def measure():
    """Train in processes of their own; return the losses by library and number of processes."""
    runs = {}
    for library, train in zip(LIBRARIES, (by_accelerate, by_accel_fn), strict=True):
        for size in SIZES:
            (found, losses), *_ = af.launch(train, num_processes=size, cpu=True)
            assert found == size
            runs[library, size] = losses
    return runs


def draw(runs):
    """The picture as SVG, a panel for each library; each curve has its last loss as a title."""
    high = max(losses[0] for losses in runs.values())
    width, height = 2 * (LEFT + WIDTH) + GAP, TOP + HEIGHT + 44
    drawn = []
    for place, library in enumerate(LIBRARIES):
        x = LEFT + place * (LEFT + WIDTH)
        drawn += [text(x, 24, library, 'font-weight="bold"'), *axes(x, high)]
        for size in SIZES:
            losses = runs[library, size]
            colour, thickness = LINES[size]
            points = " ".join(
                f"{x + WIDTH * at / (len(losses) - 1):.1f},{height_of(loss, high):.1f}"
                for at, loss in enumerate(losses)
            )
            drawn.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" '
                f'stroke-width="{thickness}"><title>{title(library, size, losses)}</title></polyline>'
            )
        ends = {f"{runs[library, size][-1]:.2f}" for size in SIZES}
        drawn += [
            text(x + WIDTH + 6, height_of(float(each), high) + 4, each) for each in sorted(ends)
        ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" font-family="sans-serif" font-size="12">',
            STYLE,
            f'<rect class="card" width="{width}" height="{height}" rx="12"/>',
            *drawn,
            *legend(),
            "</svg>\n",
        ]
    )


def title(library, size, losses):
    """Name a curve and its last loss."""
    return f"{library} on {size}: {losses[-1]:.4f}"


def height_of(loss, high):
    """Return the y of a loss."""
    return TOP + HEIGHT * (1 - min(loss / high, 1))


def axes(x, high):
    """Two lines, and the losses at ends and middle."""
    bottom = TOP + HEIGHT
    drawn = [
        f'<path class="axis" d="M{x} {TOP} V{bottom} H{x + WIDTH}" fill="none"/>',
        text(x, bottom + 20, "updates"),
        text(x + WIDTH, bottom + 20, NUM_PASSES * NUM_ANSWERS // BATCH_SIZE, 'text-anchor="end"'),
    ]
    for loss in (0, high / 2, high):
        y = height_of(loss, high) + 4
        drawn.append(text(x - 8, y, f"{loss:.2f}", 'text-anchor="end"'))
    return drawn


def legend():
    """Return the colour of each number of processes."""
    drawn = [text(LEFT, 44, "loss of a token, mean over all data")]
    for place, (size, (colour, thickness)) in enumerate(LINES.items()):
        x = LEFT + LEFT + WIDTH + 110 * place
        drawn.append(
            f'<path d="M{x} 40 h20" stroke="{colour}" stroke-width="{thickness}" fill="none"/>'
        )
        drawn.append(text(x + 26, 44, f"{size} process{'es' if size > 1 else ''}"))
    return drawn


def text(x, y, content, more=""):
    """A word or a number at a place."""
    return f'<text x="{x}" y="{y:.0f}" class="ink" {more}>{content}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(measure()))
