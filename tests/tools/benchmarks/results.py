"""Results of a benchmark as rows and tables, with the verdict on each target."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.tools.benchmarks.counting import Counts
from tests.tools.benchmarks.measuring import Block


@dataclass(frozen=True, slots=True)
class Row:
    """One variant: microseconds per update, and ratios to the base as quartiles over the rounds.

    `note` says why there are no figures.
    """

    name: str
    note: str = ""
    cpu_us: float = 0.0
    wall_us: float = 0.0
    cpu_ratio: tuple[float, float, float] = (1.0, 1.0, 1.0)
    wall_ratio: tuple[float, float, float] = (1.0, 1.0, 1.0)
    difference: float = 0.0
    target: float | None = None
    is_faulty: bool = False
    calls: float | None = None
    """Python calls of an update; None of compiled code."""
    ops: float | None = None
    """ATen operations of an update."""

    @property
    def verdict(self) -> str:
        """Return "met" if the median reaches the target, "within noise" if only the better quartile
        does."""
        if self.target is None or self.note:
            return ""
        better, median, _ = self.cpu_ratio
        if median <= self.target:
            return "met"
        return "within noise" if better <= self.target else "missed"

    @property
    def aim(self) -> str:
        """Return the target and its verdict, for a table."""
        return f"{self.target:.2f}: {self.verdict}" if self.verdict else ""


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one scenario."""

    name: str
    rows: tuple[Row, ...]
    disturbed: float
    """The share of blocks that other processes disturbed even after repeats."""
    clock: str = "CPU"
    """Which time the rows have: CPU time of the process, or wall time."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Table:
        return cls(**{**fields, "rows": tuple(Row(**row) for row in fields["rows"])})


def make_row(
    name: str,
    blocks: Sequence[Block],
    base: Sequence[Block],
    num_updates: int,
    difference: float,
    target: float | None,
    counts: Counts | None = None,
) -> Row:
    calls, ops = counts or (None, None)
    return Row(
        name,
        calls=calls,
        ops=ops,
        cpu_us=statistics.median(block.cpu for block in blocks) / num_updates * 1e6,
        wall_us=statistics.median(block.wall for block in blocks) / num_updates * 1e6,
        cpu_ratio=quartiles(a.cpu / b.cpu for a, b in zip(blocks, base, strict=True)),
        wall_ratio=quartiles(a.wall / b.wall for a, b in zip(blocks, base, strict=True)),
        difference=difference,
        target=target,
    )


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    values = list(values)
    if len(values) == 1:
        return (values[0], values[0], values[0])
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, middle, upper
