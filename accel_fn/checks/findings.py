"""Findings about a few rows and their parts; ranks exchange these objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

import torch

_LOSS = {torch.float64: (1e-8, 1e-12), torch.float32: (1e-4, 1e-5)}
_LOSS_IN_HALF = (2e-2, 1e-2)
"""Relative and absolute tolerance of losses in half precision; `_LOSS` has those of other dtypes.
The sum over parts adds numbers in a different order, and so rounds differently."""
_GRADIENT = {torch.float64: (1e-8, 1e-15), torch.float32: (1e-4, 1e-7)}
_UNDER_AUTOCAST, _OF_HALVES, _IN_FLOAT8 = (2e-2, 2e-3), (1e-1, 2e-3), (5e-1, 1e-2)
"""Tolerances of gradients, relative to the parameter's gradient and to the model's largest one."""


@dataclass(frozen=True, slots=True)
class Cut:
    """For one term, the loss of a batch, and the losses and weights of its parts.

    `shifted` has the weights for the other `shift` of `count_labels`, or None without labels.
    """

    term: str
    """The name of the term that these losses belong to; "" for a loss with one number."""
    whole: float
    losses: Sequence[float]
    weights: Sequence[float]
    shifted: Sequence[float] | None

    def slack(self, tolerance: tuple[float, float]) -> float:
        """Return how far a sum in a different order may differ from the loss."""
        relative, least = tolerance
        return relative * max(map(abs, (self.whole, *self.losses))) + least

    def fits(self, tolerance: tuple[float, float]) -> set[str]:
        """Return the reductions for which the parts give the loss of the batch."""
        means = _mean(self.losses, self.weights), _mean(self.losses, self.shifted)
        values = {"mean": means[0], "sum": sum(self.losses), "shift": means[1]}
        slack = self.slack(tolerance)
        return {
            name
            for name, value in values.items()
            if value is not None and abs(value - self.whole) <= slack
        }


@dataclass(frozen=True, slots=True)
class Gradients:
    """One rank's norms per parameter: of the batch's gradient, and of its difference from the parts' sum."""

    whole: Sequence[float]
    scale: Sequence[float]
    """The largest norm while the parts' gradients were subtracted from the batch's."""
    rest: Sequence[float]

    def beside(self, norms: Sequence[float]) -> Gradients:
        """Return a copy in which each `scale` is at least as large as the parameter's entry in `norms`."""
        return replace(self, scale=[*map(max, self.scale, norms)])


@dataclass(frozen=True, slots=True)
class Reads:
    """Whether a forward reads values that an earlier forward has written."""

    parts: bool
    """Whether the results of a part change if another part runs before it."""
    rows: bool
    """Whether the results of a part after another part differ from its results after the batch."""


@dataclass(frozen=True, slots=True)
class Write:
    """How a value that a forward writes to the model depends on the cut of the batch."""

    kind: str
    of_parts: bool
    """Whether the value after all parts, one after the other, differs from the value after the
    batch."""
    of_rows: bool
    """Whether the value after one part differs from the value after the batch."""
    reads: Reads
    bits: int | None = None
    """A checksum of the value after the batch, if the loss calls collectives: it shows whether
    ranks write equal values."""

    @property
    def is_sum(self) -> bool:
        """Return whether the value is a sum over rows that no forward reads; then parts may add to it."""
        return self.kind == "buffer" and not (self.of_parts or self.reads.rows)


@dataclass(frozen=True, slots=True)
class Found:
    """The results of one rank's comparison of a few rows with their parts."""

    cuts: Sequence[Cut] = ()
    twice: Sequence[Cut] = ()
    """The loss of the same rows, run again at the end, stored like the loss of a part."""
    tolerance: tuple[float, float] = _LOSS_IN_HALF
    gradients: Gradients | None = None
    by_row: tuple[Sequence[Cut], Gradients | None] | None = None
    """Cuts and gradients of runs in which each row has its own random numbers."""
    precisions: Sequence[torch.dtype] = ()
    """The dtype in which the gradient of each trained parameter is computed."""
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The metrics that differ between the batch and its parts together, by name, with both values."""
    writes: Mapping[str, Write] = field(default_factory=dict)
    calls_collectives: bool = False
    in_turn: tuple[Sequence[Cut], Gradients | None] | None = None
    """For a loss that calls collectives: the results for the rows of all ranks, dealt to the ranks
    in order and in turn."""
    moved: tuple[Sequence[Cut], Gradients | None] | None = None
    """The results for the rows of all ranks, dealt in turn, and with one row moved to another rank."""
    denominators: Sequence[str] = ()
    """The names of numbers that a collate_fn computes over its samples, and that change the loss."""
    has_one_value_a_row: bool = False
    """Whether a BatchNorm in training gets one value per feature and row, so that a single row has
    no variance."""
    is_counted: bool = False
    """Whether the loss is `(sum, count)`."""
    unseen: str = ""
    """The quantities that were not compared, as text for the message; the losses were compared."""

    def fitting(self, cuts: Sequence[Cut]) -> set[str]:
        """Return the reductions for which the parts of every cut give the loss of the batch."""
        found = {"mean", "sum", "shift"}
        for cut in cuts:
            found &= cut.fits(self.tolerance)
        return found

    def differing(self) -> Cut | None:
        """Return a term whose loss differs between two runs of the same batch, if there is one."""
        return next((each for each in self.twice if "sum" not in self.fitting([each])), None)


def loss_tolerance(dtype: torch.dtype, precisions: Sequence[torch.dtype]) -> tuple[float, float]:
    """Return the tolerance of losses of this dtype that were computed in these precisions."""
    found = [_LOSS.get(each, _LOSS_IN_HALF) for each in (dtype, *precisions)]
    return max(found)


def agree(pair: tuple[float, float], tolerance: tuple[float, float]) -> bool:
    """Return whether two numbers are equal up to rounding."""
    relative, least = tolerance
    return abs(pair[0] - pair[1]) <= relative * max(map(abs, pair)) + least


def wrong_gradient(
    every: Sequence[Gradients],
    parameters: Sequence[torch.dtype],
    precisions: Sequence[torch.dtype],
) -> tuple[int, float] | None:
    """Find the parameter with the largest error of its gradient beyond rounding.

    Return the parameter's number, and the error relative to the gradient's norm; None if none is
    wrong.
    """
    whole, scale, rest = (
        [sum(norm**2 for norm in norms) ** 0.5 for norms in zip(*of_ranks, strict=True)]
        for of_ranks in (
            [each.whole for each in every],
            [each.scale for each in every],
            [each.rest for each in every],
        )
    )
    if not all(map(isfinite, (*whole, *scale, *rest))):
        return None
    largest, worst, found = max(whole, default=0.0), 1.0, None
    for place, (dtype, precision) in enumerate(zip(parameters, precisions, strict=True)):
        relative, least = _gradient_tolerance(dtype, precision)
        allowed = relative * scale[place] + least * largest
        if rest[place] > worst * allowed:
            worst = rest[place] / allowed if allowed else float("inf")
            found = place, rest[place] / (whole[place] or scale[place] or 1.0)
    return found


def _gradient_tolerance(parameter: torch.dtype, precision: torch.dtype) -> tuple[float, float]:
    wide = torch.float64 if precision == torch.complex128 else precision
    wide = torch.float32 if wide == torch.complex64 else wide
    if wide in _GRADIENT:
        return _GRADIENT[wide]
    if wide.itemsize == 1:
        return _IN_FLOAT8
    return _OF_HALVES if parameter == precision else _UNDER_AUTOCAST


def _mean(losses: Sequence[float], weights: Sequence[float] | None) -> float | None:
    """Return the mean loss of parts; None if there are no weights, or if all weights are 0."""
    if weights is None or not sum(weights):
        return None
    return sum(loss * each for loss, each in zip(losses, weights, strict=True)) / sum(weights)
