"""Results of checked promises. Imports no torch, so that a reader need not wait for it."""

from __future__ import annotations

from dataclasses import dataclass

NOT_RUN = "not run: a check before it failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one promise on one rank.

    Attributes:
        promise: its text.
        bound: the largest difference that is allowed.
        largest: the largest that was found; None where the check came to no end.
        error: the last line of what was raised; empty where nothing was.
        traceback: all of it.
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
