"""Outcomes of checked promises. Imports no torch, so that a reader need not wait for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from accel_fn.launcher.failures import Failure, cause

NOT_RUN = "not run: a check before it failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one promise on one rank.

    Attributes:
        promise: its text.
        bound: the largest difference that is allowed.
        largest: the largest difference that was found; None if the check raised an error.
        error: the last line of the error; empty without one.
        traceback: that of the error.
        time: when it was raised.
    """

    promise: str
    bound: float
    largest: float | None = None
    error: str = ""
    traceback: str = ""
    time: float = 0.0

    @property
    def holds(self) -> bool:
        """Was a difference measured, and is it within the bound? Not-a-number is not."""
        return self.largest is not None and self.largest <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Results of one rank, and its device."""

    world_size: int
    device: str
    backend: str
    outcomes: list[Outcome]


def merge(ranks: Sequence[Outcome]) -> Outcome:
    """Merge the outcomes of one promise on all ranks; the error is that of the rank that caused it."""
    failed = {rank: outcome for rank, outcome in enumerate(ranks) if outcome.error}
    if failed:
        failures = [
            Failure(rank, "", 0, 1, outcome.time, exception=outcome.error)
            for rank, outcome in failed.items()
        ]
        return failed[cause(failures).rank]
    found = [outcome.largest for outcome in ranks if outcome.largest is not None]
    largest = math.nan if any(map(math.isnan, found)) else max(found)
    return replace(ranks[0], largest=largest)
