"""Metrics as sums and counts: added exactly over batches and ranks, and divided once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from accel_fn.core.warn import warn_user
from accel_fn.errors import ArgumentError, ArgumentTypeError, ReplicaError, message


@dataclass(frozen=True, slots=True)
class Total:
    """The running total of a metric, on the device: the host does not wait for it.

    Attributes:
        sum: int64 or float64, of any shape.
        count: int64 or float64, [] or of the sum's shape.
        num_ones: number of micro-batches, if each had several samples and a count of 1, which
            suggests means in place of sums; else 0.
    """

    sum: Tensor
    count: Tensor
    num_ones: int = 0

    def plus(self, other: Total) -> Total:
        """Add another total."""
        num_ones = self.num_ones + other.num_ones if self.num_ones and other.num_ones else 0
        return Total(self.sum + other.sum, self.count + other.count, num_ones)

    def to_host(self) -> Total:
        """Copy to the host, which waits."""
        return Total(self.sum.cpu(), self.count.cpu(), self.num_ones)


Totals = Mapping[str, Total]
NOTHING: Totals = {"loss": Total(torch.tensor(0), torch.tensor(0))}
"""Totals of a batch without items: `loss_fn` is not called, so its metrics are unknown."""


def totals_of(metrics: Any, rows: int | None) -> Totals:
    """Make totals of the metrics of a micro-batch of `rows` samples; None if they cannot be counted."""
    if not isinstance(metrics, Mapping) or not metrics:
        rule = "return a mapping of names to values"
        got = "an empty one" if isinstance(metrics, Mapping) else type(metrics).__name__
        raise ArgumentTypeError(
            message(
                "evaluate", "metric_fn", rule, got, 'return {"name": values} or (loss, metrics)'
            )
        )
    return {name: _total(name, value, rows) for name, value in metrics.items()}


def _total(name: str, value: Any, rows: int | None) -> Total:
    if isinstance(value, tuple) and len(value) == 2:
        return _pair(name, *value, rows)
    if not isinstance(value, Tensor) or value.ndim == 0 or value.size(0) != rows:
        wanted = f"[{rows}, ...], or " if rows is not None else ""
        repair = (
            "means cannot be averaged, since a mean of means is not the mean"
            if not isinstance(value, Tensor) or value.ndim == 0
            else "a value that is not one a sample needs a count"
        )
        raise ArgumentError(
            f"evaluate: metric_fn must give {name!r} as one value a sample, {wanted}(sum, count), "
            f"got {_shown(value)}; {repair}"
        )
    if value.is_complex():
        rule = f"give {name!r} as real numbers"
        raise ArgumentError(message("evaluate", "metric_fn", rule, str(value.dtype)))
    values = _where_wide(value)
    return Total(values.sum(dim=0, dtype=_widest_dtype(values)), torch.tensor(rows))


def _pair(name: str, total: Any, count: Any, rows: int | None) -> Total:
    wide_sum, wide_count = widest(total), widest(count)
    if wide_sum is None:
        rule = f"give {name!r} a sum of real numbers"
        raise ArgumentError(f"evaluate: metric_fn must {rule}, got {_shown(total)}")
    if wide_count is None or wide_count.shape not in ((), wide_sum.shape):
        rule = f"give {name!r} a count"
        repair = "one number, or one for each of the sum's"
        raise ArgumentError(f"evaluate: metric_fn must {rule}, got {_shown(count)}; {repair}")
    counts_one = isinstance(count, int) and count == 1 and rows is not None and rows > 1
    return Total(wide_sum, wide_count, int(counts_one))


def widest(value: Any) -> Tensor | None:
    """Convert a number or real tensor to int64 if it is whole, else to float64; anything else to None."""
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    if not isinstance(value, Tensor) or value.is_complex():
        return None
    tensor = _where_wide(value)
    return tensor.to(_widest_dtype(tensor))


def _where_wide(tensor: Tensor) -> Tensor:
    """Detach, and leave a device that has no float64."""
    return tensor.detach().cpu() if tensor.device.type == "mps" else tensor.detach()


def _widest_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.is_floating_point() else torch.int64


def _shown(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def added(totals: Totals, found: Totals) -> Totals:
    """Add the totals of one more micro-batch."""
    if not totals or totals is NOTHING:
        return found
    if found is NOTHING:
        return totals
    if totals.keys() != found.keys():
        rule = f"give the same metrics for every batch, {sorted(totals)} before"
        raise ArgumentError(message("evaluate", "metric_fn", rule, sorted(found)))
    for name, new in found.items():
        shape = list(totals[name].sum.shape)
        if shape != list(new.sum.shape):
            rule = f"give {name!r} one shape for every batch, {shape} before"
            raise ArgumentError(message("evaluate", "metric_fn", rule, list(new.sum.shape)))
    return {name: total.plus(found[name]) for name, total in totals.items()}


def means(every: Sequence[Totals], *, is_main: bool) -> dict[str, float | Tensor]:
    """Compute the means from the totals of all ranks, on the host, the same on every rank.

    The main rank warns of pairs that may be means of means.
    """
    counted = [{} if _is_nothing(totals) else totals for totals in every]
    every = counted if any(counted) else every
    shapes = [{name: list(total.sum.shape) for name, total in totals.items()} for totals in every]
    first = next((rank for rank, totals in enumerate(every) if totals), None)
    if first is None:
        repair = "an iterator gives its batches only once"
        raise ArgumentError(message("evaluate", "loader", "give a batch", "none", repair))
    for rank, found in enumerate(shapes):
        if found and found != shapes[first]:
            raise ReplicaError(
                f"evaluate: metric_fn must give the same metrics on every rank, got {found} on rank "
                f"{rank} and {shapes[first]} on rank {first}"
            )
    whole = reduce(added, filter(None, every))
    for name, total in whole.items():
        if total.num_ones > 1 and is_main:
            warn_user(
                f"evaluate: metric_fn gave {name!r} with a count of 1 for each of {total.num_ones} "
                "micro-batches of several samples; if its sums are means, this is a mean of means, "
                "which is not the mean: give a sum and its count"
            )
    return {name: _mean(name, total) for name, total in whole.items()}


def _is_nothing(totals: Totals) -> bool:
    # A rank may have a sum and no count: all anchors, by the number of the positive ones.
    if totals.keys() != NOTHING.keys():
        return False
    return not (totals["loss"].count.any() or totals["loss"].sum.any())


def _mean(name: str, total: Total) -> float | Tensor:
    if not bool(((total.count >= 0) & total.count.isfinite()).all()):
        rule = f"give {name!r} finite counts >= 0"
        raise ArgumentError(message("evaluate", "metric_fn", rule, total.count.tolist()))
    mean = (total.sum.double() / total.count).where(total.count > 0, torch.nan)
    return mean if mean.ndim else mean.item()
