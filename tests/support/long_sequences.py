"""A language model whose positions are in the batch, and batches that `wrap_cp` may cut anywhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.language_model import NUM_TOKENS

DIMS = {"input_ids": 1, "labels": 1, "position_ids": 1}
"""What `wrap_cp` cuts; `documents` stay whole, for the mask."""
STYLES = {
    f"blocks.*.{name}": "rowwise" if name in ("out", "down") else "colwise"
    for name in ("query", "key", "value", "out", "up", "down")
}
"""How `wrap_tp` splits the model."""
MAX_TOKENS = 16


class Block(nn.Module):
    """Attention with two query heads for each head of keys, and a perceptron."""

    def __init__(self, head_size: int = 4, num_heads: int = 4) -> None:
        super().__init__()
        width, num_keys = head_size * num_heads, head_size * num_heads // 2
        self.head_size = head_size
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        # A bias of keys would have a gradient of rounding alone.
        self.key, self.value = nn.Linear(width, num_keys, bias=False), nn.Linear(width, num_keys)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        normed = self.norm(hidden)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, enable_gqa=True
        )
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.second_norm(hidden))))


class LongModel(nn.Module):
    """A causal model; `documents` in a batch keep packed documents apart.

    `reentrant`: whether torch's activation checkpoints are of that kind; None, no checkpoints.
    """

    def __init__(self, *, depth: int = 2, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.embedding = nn.Embedding(NUM_TOKENS, 16)
        self.places = nn.Parameter(torch.randn(MAX_TOKENS, 16) * 0.1)
        self.head = nn.Linear(16, NUM_TOKENS, bias=False)
        self.reentrant = reentrant

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.embedding(batch["input_ids"]) + self.places[batch["position_ids"]]
        mask = same_document(batch["documents"]) if "documents" in batch else None
        for block in self.blocks:
            if self.reentrant is None:
                hidden = block(hidden, mask)
            else:
                hidden = checkpoint(block, hidden, mask, use_reentrant=self.reentrant)
        return self.head(hidden)


def same_document(documents: Tensor) -> Tensor:
    """Return which earlier tokens each token sees, [rows, 1, length, length]."""
    length = documents.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    return ((documents[:, :, None] == documents[:, None]) & earlier)[:, None]


def long_model(seed: int = 0, **options: Any) -> LongModel:
    """Make a model in float64, from a seed of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LongModel(**options).double()


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """Return the mean over labels that are not ignored, 0/0 if all are; and two metrics."""
    logits, labels = model(batch), batch["labels"]
    counts = labels != -100
    right = ((logits.argmax(-1) == labels) & counts).sum()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss, {"right": (right, counts.sum()), "part": right.double() / counts.sum()}


def batches(
    *sizes: int, length: int = 10, packed: bool = False, seed: int = 0
) -> list[dict[str, Tensor]]:
    """Make batches of so many rows; half of the rows have labels in one half of the tokens alone."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in sizes:
        tokens, labels = torch.randint(0, NUM_TOKENS, (2, size, length), generator=generator)
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
        labels[: (size + 1) // 2, length // 2 :] = -100
        labels[:, 0] = 1
        batch = {"input_ids": tokens, "labels": labels}
        places = torch.arange(length).expand(size, length)
        if packed:
            starts = torch.rand(size, length, generator=generator) < 0.2
            starts[:, 0] = True
            batch["documents"] = starts.cumsum(1)
            places = places - (places * starts).cummax(1).values
        found.append({**batch, "position_ids": places.contiguous()})
    return found
