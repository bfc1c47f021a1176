"""Collective checks: each rank checks its own arguments, and all ranks raise if one fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from accel_fn.base.state import DistState
from accel_fn.comm import primitives
from accel_fn.errors import PeerError

T = TypeVar("T")


def agreed(
    make: Callable[[], T], state: DistState, function: str, leaves: Sequence[Any] = ()
) -> list[T]:
    """Exchange what `make` returns on each rank, in rank order; if it raises on one rank, all raise.

    Args:
        make: returns a picklable value, or raises.
        state: of this rank.
        function: the public one, the same on every rank.
        leaves: their shapes are shown in hang reports.

    Returns:
        The values.

    Raises:
        Exception: raised by `make` on this rank.
        PeerError: `make` raised on another rank alone.

    Cost: two small collectives on the host.
    """
    value, failure = None, None
    try:
        value = make()
    except Exception as error:
        failure = error
    verdict = None if failure is None else repr(failure)
    every = primitives.exchange((value, verdict), state, function, leaves)
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # an error that this frame holds would keep the frame, and it the error
    for rank, (_, verdict) in enumerate(every):
        if verdict is not None:
            raise PeerError(f"{function}: failed on rank {rank}: {verdict}")
    return [value for value, _ in every]


def exchange_failures(state: DistState, failure: str) -> list[str]:
    """What failed on each rank, in rank order; empty strings if nothing did.

    Cost: one small collective, and two more if something failed.
    """
    if state.world_size == 1:
        return [failure]
    failed = torch.tensor(float(bool(failure)), dtype=torch.float64)
    primitives.start_total(failed, state, "step", what="failures").wait()
    if not failed:
        return [""] * state.world_size
    return primitives.exchange(failure, state, "step")
