"""One verdict on all ranks over what each was given, though it can look at its own alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from accel_fn.base.state import DistState
from accel_fn.comm import primitives
from accel_fn.errors import PeerError

T = TypeVar("T")


def agreed(
    told: Callable[[], T], state: DistState, function: str, of: Sequence[Any] = ()
) -> list[T]:
    """What every rank has to tell, in rank order; where one cannot, all raise.

    Args:
        told: gives something picklable, or raises what is wrong on this rank.
        state: of this rank.
        function: the public one that asks; the same on every rank.
        of: what a report on a rank that waits here tells the shapes of.

    Returns:
        The values.

    Raises:
        Exception: what `told` raised on this rank.
        PeerError: it raised on another rank alone.

    Cost: two small collectives on the host.
    """
    mine, failure = None, None
    try:
        mine = told()
    except Exception as error:
        failure = error
    verdict = None if failure is None else repr(failure)
    every = primitives.exchange((mine, verdict), state, function, of)
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # an error that this frame holds would keep the frame, and it the error
    for rank, (_, verdict) in enumerate(every):
        if verdict is not None:
            raise PeerError(f"{function}: failed on rank {rank}: {verdict}")
    return [value for value, _ in every]
