"""Padding: every rank runs as many micro-batches, where a forward or a backward has collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel_fn.base.state import DistState, data_places, over
from accel_fn.comm import primitives
from accel_fn.comm.collectives import broadcast
from accel_fn.step.global_mean import GlobalMean
from accel_fn.step.microbatches import Parts, Weights
from accel_fn.step.strategy import Strategy


class PaddingStrategy(Strategy):
    """A strategy in which a rank with fewer micro-batches than another runs one of its, of weight 0."""

    pads = True

    def __init__(self, state: DistState, *args: Any, **options: Any) -> None:
        super().__init__(state, *args, **options)
        self.ranks = over(state)
        """The ranks that run as many."""
        self.begin_pass: Callable[[bool, int], None] = _nothing
        """Called with whether gradients are wanted, and the number of micro-batches that every rank runs."""

    def pad(
        self, state: DistState, mean: GlobalMean | None, parts: Parts, weights: Weights
    ) -> tuple[Parts, Weights]:
        """Run as many micro-batches on every rank.

        A rank that has fewer, or none with a weight, runs one of another rank's with weight 0: times
        zero, its gradient is zero wherever that rank's is finite.

        Cost: one small collective; a broadcast of a micro-batch if a rank needs one.
        """
        # Only a forward knows what it reaches, and in which order, so it must be a real one.
        ranks = self.ranks
        if ranks.world_size == 1:
            return parts, weights
        if mean is not None:
            mean.total()  # if one rank could not count its batch, all raise here
            # In one number: how many micro-batches a rank has, and whether one of them counts.
            found = mean.of_ranks[data_places(state)] if ranks.axis else mean.of_ranks
            counts = [2 * num + bool(weight) for weight, num in found]
        else:
            code = 2 * len(parts) + any(weights)
            counts = primitives.exchange_number(code, ranks, "step")
        # A micro-batch that counts, if there is one: its loss is finite in a healthy run.
        source = max(range(len(counts)), key=lambda rank: (counts[rank] % 2, counts[rank]))
        most = max(counts) // 2
        self.begin_pass(torch.is_grad_enabled(), most)
        if min(counts) == 2 * most + counts[source] % 2:
            return parts, weights
        spare = parts[-1] if ranks.rank == source else None  # those that count are last
        spare = broadcast(spare, ranks, source=source)
        return self.filled(parts, weights, spare, most)

    def filled(
        self, parts: Parts, weights: Weights, spare: Any, most: int
    ) -> tuple[Parts, Weights]:
        """Return so many micro-batches: those of this rank, then the spare one."""
        if not any(weights):
            # The loss of what counts nothing may be 0 / 0. The last backward sends its gradients.
            parts, weights = parts[: most - 1], weights[: most - 1]
        lacking = most - len(parts)
        return [*parts, *[spare] * lacking], [*weights, *[0] * lacking]


def _nothing(with_gradients: bool, num_microbatches: int) -> None:
    """Begin a pass of a strategy that counts none."""
