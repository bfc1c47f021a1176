"""Sums of the metrics beside a loss, and the layout of both, which is the same on all ranks.

Apart from `global_mean`, because virtual ranks and compiled steps add metrics up by it without that class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accel_fn.base.state import DistState
from accel_fn.base.weights import Weight
from accel_fn.comm import primitives
from accel_fn.errors import LossError
from accel_fn.step.loss_module import Metrics
from accel_fn.step.loss_terms import COUNTED, counted_in, divided
from accel_fn.step.report import Report

_REPAIR = "return all metrics for every batch"


class Layout:
    """Layout of the losses and metrics of a step, the same in every step and on every rank.

    The metrics are those of the first batch that has items.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        sizes: Mapping[str, int] | None = None,
        *,
        is_sum: bool = False,
        terms: Sequence[str] = (),
    ) -> None:
        self.dtype = dtype
        self.is_sum = is_sum
        """Is a loss a sum over its items? Losses are then added as they are."""
        self.terms = terms
        """The names of the loss's terms, whose means are one tensor, [terms]; none: it has one mean, []."""
        self.sizes = sizes
        """The metrics by name: 1 number, or 2, a sum and its count. None: no batch had items yet."""
        self.counts: tuple[str, ...] | None = None
        """The terms of a loss that are sums and counts; none of a loss of means. None: not known yet."""
        self.finish: Mapping[str, Callable[[Mapping[str, Tensor]], Any]] = {}
        """Functions of the means of a step, whose values are metrics too."""
        self.pending_error: LossError | None = None
        """Error that all ranks raise in the next step."""

    def without_metrics(self) -> Layout:
        """The layout of a forward alone: of its metrics, the sums and counts that the loss is made of."""
        sizes = None if self.counts is None else {COUNTED + name: 2 for name in self.counts}
        return Layout(self.dtype, sizes=sizes, is_sum=self.is_sum, terms=self.terms)

    def zero(self, state: DistState) -> Tensor:
        """The mean loss of nothing, or those of its terms."""
        shape = (len(self.terms),) if self.terms else ()
        return torch.zeros(shape, dtype=self.dtype, device=state.device)

    def report(
        self, mean: Tensor, total: Weight, metrics: Mapping[str, Tensor], **others: Any
    ) -> Report:
        """A report of the mean loss, or of the means of its terms."""
        if not (metrics or self.terms or self.finish):  # faster, for most steps
            return Report(loss=mean, weight=total, metrics=metrics, **others)  # type: ignore[arg-type]
        report = self._report(mean, total, metrics, **others)
        return finished("step", self.finish, report) if self.finish else report

    def _report(
        self, mean: Tensor, total: Weight, metrics: Mapping[str, Tensor], **others: Any
    ) -> Report:
        others["metrics"] = metrics
        pairs = counted_in(metrics)
        if pairs:
            others["metrics"] = {n: each for n, each in metrics.items() if n not in pairs}
            every = {name.removeprefix(COUNTED): pair for name, pair in pairs.items()}
            means = {name: divided(pair) for name, pair in every.items()}
            loss = torch.stack([*means.values()]).sum()
            counts = {name: pair[1] for name, pair in every.items()}
            terms = means if len(means) > 1 else {}
            return Report(loss=loss, weight=total, counts=counts, terms=terms, **others)  # type: ignore[arg-type]
        if not self.terms:
            return Report(loss=mean, weight=total, **others)  # type: ignore[arg-type]
        weights = total if isinstance(total, tuple) else (0,) * len(self.terms)
        weight = dict(zip(self.terms, weights, strict=True))
        terms = dict(zip(self.terms, mean.unbind(), strict=True))
        return Report(loss=mean.sum(), weight=weight, terms=terms, **others)

    def settle(self, state: DistState, sums: Sequence[MetricSums]) -> LossError | None:
        """Fix the metrics if no batch had items yet; return the error of metrics that are not the same.

        On one rank it is raised, and so it is on all ranks while the metrics are being fixed.
        """
        wrong = next((each.wrong for each in sums if each.wrong), "")
        found = [sizes_of(each.found) for each in sums if each.found is not None]
        if self.sizes is None:
            self.sizes = self._agree(state, found, wrong)
        differing = (_differing(self.sizes or {}, each) for each in found if each != self.sizes)
        wrong = wrong or next((f"{text}; {_REPAIR}" for text in differing), "")
        if wrong and state.world_size == 1:
            raise LossError(wrong)
        return LossError(wrong) if wrong else None

    def _agree(
        self, state: DistState, found: Sequence[Mapping[str, int]], wrong: str
    ) -> Mapping[str, int] | None:
        """The metrics that any rank has found; raises on every rank if they are not the same."""
        # Ranks without items do not know them, and the sum over the ranks needs one length.
        expected = None
        for rank, (of_rank, failure) in enumerate(
            primitives.exchange((found, wrong), state, "step")
        ):
            if failure:
                raise LossError(failure)
            for each in of_rank:
                expected = each if expected is None else expected
                if each != expected:
                    raise LossError(f"{_differing(expected, each)} on rank {rank}; {_REPAIR}")
        return expected

    def means(self, values: Mapping[str, Tensor], total: Weight, like: Tensor) -> dict[str, Tensor]:
        """The means, from the sums over all ranks; nan where nothing was counted."""
        nothing = like.new_full((), torch.nan)
        means = {
            name: _mean(values[name]) if total and name in values else nothing
            for name, _ in self._sorted()
            if not name.startswith(COUNTED)
        }
        return {**self.pairs(values, like), **means}

    def pairs(self, values: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
        """The sums and counts of the loss over all ranks, [2] each."""
        names = [name for name, _ in self._sorted() if name.startswith(COUNTED)]
        return {name: values[name] if name in values else like.new_zeros(2) for name in names}

    def vector(self, values: Mapping[str, Tensor], like: Tensor, *, is_wrong: bool) -> list[Tensor]:
        """The sums in the order of names, 0 if this rank has none; nan if its metrics are others."""
        missing = torch.nan if is_wrong else 0.0
        held: Mapping[str, Tensor] = {} if is_wrong else values
        return [
            held[name] if name in held else like.new_full((size,), missing)
            for name, size in self._sorted()
        ]

    def unpacked(self, vector: Tensor) -> dict[str, Tensor]:
        """The sums by name."""
        names, sizes = [name for name, _ in self._sorted()], [size for _, size in self._sorted()]
        return dict(zip(names, torch.split(vector, sizes), strict=True))

    def _sorted(self) -> list[tuple[str, int]]:
        return sorted((self.sizes or {}).items())


def finished(
    function: str, finish: Mapping[str, Callable[[Mapping[str, Tensor]], Any]], report: Report
) -> Report:
    """The report with functions of its means among the metrics."""
    means = {"loss": report.loss, **report.terms, **report.metrics}
    found = finish_means(function, finish, means, report.loss)
    return replace(report, metrics={**report.metrics, **found})


def finish_means(
    function: str,
    finish: Mapping[str, Callable[[Mapping[str, Tensor]], Any]],
    means: Mapping[str, Tensor],
    like: Tensor,
) -> dict[str, Tensor]:
    """The values of functions of means, by name, each []."""
    found = {}
    for name, fn in finish.items():
        if name in means:
            raise LossError(
                f"{function}: finish must name new metrics, got {name!r}, which the loss has"
            )
        value = fn(means)
        is_number = isinstance(value, int | float) or (
            isinstance(value, Tensor) and not value.ndim and not value.is_complex()
        )
        if not is_number:
            got = f"{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise LossError(
                f"{function}: finish must return a real number or 0-dim tensor for {name!r}, got {got}"
            )
        found[name] = torch.as_tensor(value).detach().to(like)
    return found


def _mean(value: Tensor) -> Tensor:
    """A mean, [], of its one number, or of a sum and its count."""
    return value[0] if len(value) == 1 else value[0] / value[1]


class MetricSums:
    """Sums of the metrics of micro-batches: of a mean times its factor, or of a sum and its count."""

    found: dict[str, Tensor] | None = None
    """By name, [1] or [2]; None before the first micro-batch that counts."""
    wrong: str = ""
    """Why these metrics cannot be added up; empty if they can."""

    def add(self, metrics: Metrics, factor: Weight | Tensor, like: Tensor) -> None:
        """Count a micro-batch, in the dtype and on the device of `like`."""
        # Metrics beside several terms are no means: `LossModule` marks those that are.
        factor = 1.0 if isinstance(factor, tuple) else factor
        sums = {}
        for name, value in metrics.items():
            if isinstance(value, str):
                self.wrong = self.wrong or f"step: loss_fn must {value}"
            elif isinstance(value, tuple):
                sums[name] = torch.stack([each.to(like) for each in value])
            else:
                sums[name] = value.to(like).reshape(1) * factor
        if self.found is None:
            self.found = sums
        elif sizes_of(sums) != sizes_of(self.found):
            text = _differing(sizes_of(self.found), sizes_of(sums))
            self.wrong = self.wrong or f"{text}; {_REPAIR}"
        else:
            self.found = {name: each + sums[name] for name, each in self.found.items()}

    def differ_from(self, layout: Layout) -> bool:
        """Do these metrics differ from those of the first batch?"""
        known = self.found is not None and layout.sizes is not None
        return known and sizes_of(self.found or {}) != layout.sizes


def sizes_of(values: Mapping[str, Tensor]) -> dict[str, int]:
    """Count the numbers of each sum."""
    return {name: len(value) for name, value in values.items()}


def _differing(expected: Mapping[str, int], found: Mapping[str, int]) -> str:
    names = [
        [name if size == 1 else f"{name} (a pair)" for name, size in sorted(each.items())]
        for each in (expected, found)
    ]
    return (
        "step: loss_fn must return the same metrics in every step and on every rank, "
        f"{names[0]} at first, got {names[1]}"
    )


def differing_elsewhere(layout: Layout) -> LossError:
    """The error of a rank whose own metrics are right."""
    kinds, every = ("terms and metrics", "all") if layout.terms else ("metrics", "all metrics")
    return LossError(
        f"step: loss_fn must return the same {kinds} in every step and on every rank, got others on "
        f"another rank; return {every} for every batch"
    )
