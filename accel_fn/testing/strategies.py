"""Hypothesis strategies: worlds, splits, batches and weights, valid by construction."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor


def world_sizes(max_size: int = 4) -> st.SearchStrategy[int]:
    """Draw numbers of ranks, 1 .. max_size."""
    return st.integers(1, max_size)


def microbatch_counts(max_count: int = 8) -> st.SearchStrategy[int]:
    """Draw arguments of `accumulate`, 1 .. max_count."""
    return st.integers(1, max_count)


def seeds() -> st.SearchStrategy[int]:
    """Draw seeds for explicit generators."""
    return st.integers(0, 2**31 - 1)


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    num_features: int = 3,
    num_batches: int = 3,
    max_samples: int = 12,
    dtype: torch.dtype = torch.float64,
) -> list[tuple[Tensor, Tensor]]:
    """Draw global batches of any sizes: inputs [num_samples, num_features] and targets [num_samples, 1]."""
    sizes = draw(st.lists(st.integers(1, max_samples), min_size=1, max_size=num_batches))
    generator = torch.Generator().manual_seed(draw(seeds()))
    return [
        (
            torch.randn(size, num_features, generator=generator, dtype=dtype),
            torch.randn(size, 1, generator=generator, dtype=dtype),
        )
        for size in sizes
    ]


@st.composite
def labelled_batches(
    draw: st.DrawFn,
    *,
    num_features: int = 3,
    num_classes: int = 4,
    num_batches: int = 3,
    max_samples: int = 8,
    sequence_length: int = 3,
    ignore_index: int = -100,
) -> list[dict[str, Tensor]]:
    """Draw global batches for token losses, with labels masked at random; a part may have no label.

    `inputs` is [num_samples, sequence_length, num_features], float64; `labels`
    is [num_samples, sequence_length], int64; at least one label counts.
    """
    found: list[dict[str, Tensor]] = []
    for inputs, _ in draw(
        batches(
            num_features=num_features * sequence_length,
            num_batches=num_batches,
            max_samples=max_samples,
        )
    ):
        size = inputs.size(0)
        count = size * sequence_length
        masked = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        labels = torch.arange(count) % num_classes
        labels[torch.tensor(masked)] = ignore_index
        labels[draw(st.integers(0, count - 1))] = 0
        found.append(
            {
                "inputs": inputs.reshape(size, sequence_length, num_features),
                "labels": labels.reshape(size, sequence_length),
            }
        )
    return found


@st.composite
def weights(
    draw: st.DrawFn,
    num_samples: int,
    *,
    max_weight: float = 4.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Draw weights of samples: [num_samples], 0 or 0.25 .. max_weight; at least one counts."""
    weight = st.just(0.0) | st.floats(0.25, max_weight)
    found = draw(st.lists(weight, min_size=num_samples, max_size=num_samples))
    found[draw(st.integers(0, num_samples - 1))] = draw(st.floats(0.25, max_weight))
    return torch.tensor(found, dtype=dtype)


@st.composite
def uneven_parts(draw: st.DrawFn, num_samples: int, world_size: int) -> list[int]:
    """Draw sizes >= 0 of `world_size` consecutive parts that add up to `num_samples`."""
    cuts = draw(
        st.lists(st.integers(0, num_samples), min_size=world_size - 1, max_size=world_size - 1)
    )
    return [stop - start for start, stop in pairwise([0, *sorted(cuts), num_samples])]
