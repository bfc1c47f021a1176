"""A small language model, as tensor parallelism splits it, and batches of masked tokens for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_TOKENS = 11

STYLES = {
    "blocks.*.query": "colwise",
    "blocks.*.key": "colwise",
    "blocks.*.value": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Block(nn.Module):
    """Attention over the tokens before, and a perceptron, each behind a norm and a dropout."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_size = width // num_heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        # A bias of keys moves all scores of a query alike: its gradient is rounding alone, which AdamW
        # turns into updates of the size of the rate.
        self.key = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.first_norm(hidden)))
        return hidden + self.dropout(self.down(F.gelu(self.up(self.second_norm(hidden)))))

    def attention(self, hidden: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        query, key, value = (
            layer(hidden).view(rows, length, -1, self.head_size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


class LanguageModel(nn.Module):
    def __init__(
        self, *, num_heads: int = 2, depth: int = 2, is_tied: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        width = 4 * num_heads
        self.embedding = nn.Embedding(NUM_TOKENS, width)
        self.places = nn.Parameter(torch.randn(16, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_TOKENS, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def language_model(seed: int = 0, **options: object) -> LanguageModel:
    """Make a language model in float64, from a seed of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LanguageModel(**options).double()  # type: ignore[arg-type]


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over labels that are not ignored; 0/0 if all are."""
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def batches(*sizes: int, seed: int = 0, masked: float = 0.3) -> list[dict[str, Tensor]]:
    """Make batches of so many rows of five tokens; the labels of some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in sizes:
        tokens = torch.randint(0, NUM_TOKENS, (size, 6), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < masked] = -100
        labels[0, 0] = 1
        found.append({"tokens": tokens[:, :-1], "labels": labels})
    return found
