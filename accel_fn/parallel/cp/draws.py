"""Random draws in a block of tokens: each rank along the axis draws different numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from accel_fn.core.primitives import current_world
from accel_fn.parallel.draws import generator_of, seed_at


class _Forward(threading.local):
    is_of_block = False


_FORWARD = _Forward()


def is_of_block() -> bool:
    """Return whether this thread runs the forward of a block of tokens."""
    return _FORWARD.is_of_block


@contextmanager
def draws_of_block(device: torch.device, rank: int) -> Iterator[None]:
    """Seed the draws of a block's forward by the generator's state and the rank.

    Ranks along the axis hold the same rows, so their generators have the same state, and dropout
    would repeat one mask in each block. After the context, the generators are equal again:
    unchanged without draws, else advanced by one number. Activation checkpoints restore the
    generator's state of the forward.
    """
    _FORWARD.is_of_block = True
    # Without a default group, ranks are simulated by threads. They share the generators, so no rank
    # may seed them.
    generator = generator_of(device) if current_world() else None
    outside = inside = torch.empty(0)
    if generator is not None:
        outside = generator.get_state()
        generator.manual_seed(seed_at(outside, rank))
        inside = generator.get_state()
    try:
        yield
    finally:
        _FORWARD.is_of_block = False
        if generator is not None:
            has_drawn = not torch.equal(generator.get_state(), inside)
            generator.set_state(outside)
            if has_drawn:
                torch.rand((), device=device)
