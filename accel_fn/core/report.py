"""Report: the results of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Report:
    """The results of one step. Its tensors stay on the device: reading them waits for it.

    Attributes:
        loss: [], detached: the mean over the items of the global batch, or the sum of its terms;
            float32, or float64 if a trained parameter is.
        weight: number of items of the global batch, over all ranks; if `weight_fn` is a mapping, a
            number for each term, by name.
        samples: number of rows of the global batch, as `state.samples` counts them.
        grad_norm: [], float32: the global norm of the averaged and unscaled gradients, when it was
            first read; None if nothing in the plan reads it.
        metrics: the metrics of `loss_fn`, by name, over the global batch: each [], of the loss's
            dtype, detached; nan if nothing was counted.
        terms: if `weight_fn` is a mapping, the mean of each term over its own items of the global
            batch, by name: each [], with the dtype of `loss`; 0 if nothing was counted.
        counts: if `loss_fn` returns sums and counts, the count of each term over the global batch,
            by name ("loss" if there is only one): each [], with the dtype of `loss`. `weight` is
            then the number of samples.
        applied: [], bool: whether the optimizer was run. False if the update was skipped.
        extras: values that transforms add, by name.
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
    """The value that `verdict_of` returns. If it is None, `verdict_of` returns `applied`."""


def verdict_of(report: Report) -> Tensor:
    """Return `applied`, on the host if the host has already waited for it."""
    applied = report.applied if report._verdict is None else report._verdict
    assert applied is not None
    return applied
