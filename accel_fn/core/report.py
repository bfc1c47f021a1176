"""Report: the results of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Report:
    """Results of one step. Tensors stay on the device: reading them waits for it.

    Attributes:
        loss: [], detached: the mean over the items of the global batch, or the sum of its terms;
            float32, or float64 where a trained parameter is.
        weight: number of items of the global batch, over all ranks; where `weight_fn` is a mapping,
            that of each term, by name.
        samples: number of rows of the global batch, as `state.samples` counts them.
        grad_norm: [], float32: the global norm when it was first read, of the
            averaged and unscaled gradients; None where nothing in the plan reads it.
        metrics: what `loss_fn` returns beside the loss, by name, over the global batch: each [], of
            the loss's dtype, detached; nan where nothing was counted.
        terms: where `weight_fn` is a mapping, the mean of each term over its own items of the global
            batch, by name: each [], as `loss`; 0 where nothing was counted.
        counts: where `loss_fn` returns sums and counts, the count of each term over the global batch, by name
            ("loss" of one alone): each [], as `loss`. `weight` is then the number of samples.
        applied: [], bool: was the optimizer run? False where the update was skipped.
        extras: what transforms add, by name.
    """

    loss: Tensor
    weight: float | Mapping[str, float]
    samples: int = 0
    grad_norm: Tensor | None = None
    applied: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    _verdict: Tensor | None = field(default=None, repr=False)
    """The value that `verdict_of` returns. None means `applied`."""


def verdict_of(report: Report) -> Tensor:
    """Return `applied`, on the host if the host has already waited for it."""
    applied = report.applied if report._verdict is None else report._verdict
    assert applied is not None
    return applied
