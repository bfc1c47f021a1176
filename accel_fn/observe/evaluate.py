"""evaluate: compute metrics over a whole data set and all ranks, as on one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from accel_fn.checks.first_batches import Looks
from accel_fn.checks.metrics import MetricsLook
from accel_fn.checks.trial import Outputs
from accel_fn.core.loss import (
    COUNTED,
    Outcome,
    broken_pair,
    broken_rule,
    checked_metrics,
    counted,
    counted_in,
    given_frozen,
    is_mean,
    kind_of,
    pairs_in,
    parted,
    run_placed,
    stacked,
)
from accel_fn.core.mean import finish_means
from accel_fn.core.microbatches import Parts, Weights, microbatches
from accel_fn.core.plan import FinishFn, Plan, check_finish
from accel_fn.core.state import DistState
from accel_fn.core.step import Step
from accel_fn.core.warn import warn_user
from accel_fn.core.weights import Weight, weigh
from accel_fn.errors import ArgumentError, ArgumentTypeError, LossError, ReplicaError, message
from accel_fn.observe.over_loader import (
    CutBatch,
    check_loader,
    check_step,
    num_rows,
    over_loader,
    over_parts,
    parts_with_rows,
    read_on_all_ranks,
    settled,
)

Metric = Tensor | tuple[float | Tensor, float | Tensor]
MetricFn = Callable[..., Mapping[str, Metric] | tuple[Any, Mapping[str, Metric] | None]]


def evaluate(
    step: Step,
    state: DistState,
    loader: Iterable[Any],
    metric_fn: MetricFn | None = None,
    *,
    progress: bool | None = None,
    finish: Mapping[str, FinishFn] | None = None,
) -> dict[str, float | Tensor]:
    """Compute metrics, or a loss, over every sample of a loader, once, and over all ranks: sums over counts.

    It runs with the step's placement, micro-batches and autocast, without gradients. Meanwhile the
    model is in evaluation mode, and so are optimizers that have train and eval modes, such as
    schedule-free ones. All ranks evaluate the model that `save_model` would write on the main rank,
    whose buffers, such as the running statistics of BatchNorm, may differ from other ranks'.
    Afterwards each rank's own buffers and the global random generators are restored, so how often
    you evaluate does not change training. Ranks add up sums and counts, never means, so the result
    does not depend on how the samples are spread over batches and ranks.

    Law: the one-process figure, to rounding, for every world size and batch size.
    Tests: `tests/laws/law11_evaluation.py`.

    Args:
        step: the step that `build` returned.
        state: the state, as for the step; it is not changed.
        loader: a loader from `shard_loader`, also through `prefetch` or `group_batches`, or one of
            its epochs; or any iterable of this rank's batches, such as those that `shard_batch` has
            cut. Ranks may have different numbers of batches, or none. A `DataLoader` only in a
            world of one.
        metric_fn: `(model, batch) -> {name: values}`, called on every micro-batch that has rows,
            which is on the device. Values are one per sample, [num_samples, ...], integer, real or
            bool, or a pair `(sum, count)`: numbers or tensors, the count [] or of the sum's shape.
            Names and shapes are the same for every batch. Or `(model, batch) -> (loss, metrics)`:
            another `loss_fn`, for instance without label smoothing, whose means are over the plan's
            `weight_fn`. With a parameter named `frozen`, it gets the frozen models of the plan.
            Default: the plan's loss over its weights, as "loss", and the metrics of `loss_fn`.
            "loss" is the mean over items, also if `reduction` is "sum"; if `weight_fn` is a
            mapping, there is also each term by its name, and "loss" is their sum.
        progress: whether the main rank shows a bar. Default: only in a terminal or a notebook.
        finish: by name, functions of the means of the whole loader, `means -> number`, where
            `means` maps names to float64 tensors: `{"perplexity": lambda means:
            means["loss"].exp()}`. Default: the plan's `finish` if there is no `metric_fn`; else
            none.

    Returns:
        The values of `finish`, and the mean of every metric, on all ranks: a float, or a tensor in float64
        on the host if values have trailing dimensions. nan if nothing was counted.

    Raises:
        ValueError: on every rank: values that are a mean already, have another length
            than the batch, or change their names from batch to batch; a loss that is not a mean; a
            loader without a batch, or, in a world of several, a `DataLoader`; a first batch that
            differs on ranks that differ in other axes than `dp`; `local_sgd` between two averages.
        RuntimeError: on the other ranks, when one fails; names or shapes, also of buffers, differ
            between ranks.

    Warns:
        UserWarning: on the main rank: all ranks have the same first batch; pairs whose count is
            always 1; with several ranks or batches, metrics of a loss function that are functions
            of a mean, such as a perplexity (not under `wrap_fsdp`).

    Cost: one forward per micro-batch, without a collective or a host synchronisation. Exceptions:
    on MPS, which has no float64, one synchronisation; with `wrap_fsdp`, its collectives and one
    small one per batch; if ranks hold the same rows, one per batch and a comparison of the first.
    If a loss function's metrics are not pairs, three forwards of 8 to 15 samples on the main rank.
    At the end, two small collectives on the host and one host synchronisation. In a world of
    several, if the model has buffers in its `state_dict`, first a copy of these, two small
    collectives and one broadcast; not with `reproducible`.

    Note: sums are kept in float64, or in int64 for integer values, so integers are exact.

    >>> import torch, accel_fn as af
    >>> state, step = af.build(af.Plan(loss_fn, model, optimizer), af.DistState())
    >>> def metric_fn(model, batch):
    ...     inputs, targets = batch
    ...     return {"close": (model(inputs) - targets).abs().squeeze(1) < 100}
    >>> af.evaluate(step, state, [batch], metric_fn)
    {'close': 1.0}
    """
    check_step("evaluate", step, state)

    if finish is not None:
        check_finish("evaluate", finish)
    of_plan = step.plan.finish if metric_fn is None else {}
    functions = of_plan if finish is None else finish

    def read() -> tuple[tuple[Totals, Sequence[str] | None], Looks]:
        check_loader("evaluate", loader, state)
        if metric_fn is not None and not callable(metric_fn):
            rule = "be a function (model, batch) -> {name: values} or (loss, metrics)"
            raise ArgumentTypeError(message("evaluate", "metric_fn", rule, metric_fn))
        given = metric_fn and given_frozen(metric_fn, step.plan.frozen)
        own = _RankTotals(step, state, given)
        looks = over_loader("evaluate", step, loader, state, own.cut_up, own.add, progress)
        totals = {
            name: replace(each, sum=each.sum.cpu(), count=each.count.cpu())
            for name, each in own.totals.items()
        }
        return (totals, own.terms if own.has_losses else None), looks

    every = read_on_all_ranks("evaluate", step, state, read)
    found = means([totals for totals, _ in every], is_main=state.is_main)
    terms = max((each for _, each in every if each is not None), key=len, default=())
    if len(terms) > 1 or step.plan.terms:
        found = _with_sum(found, terms)
    if functions:
        wide = {name: torch.as_tensor(each, dtype=torch.float64) for name, each in found.items()}
        zero = torch.zeros((), dtype=torch.float64)
        values = finish_means("evaluate", functions, wide, zero)
        found |= {name: each.item() for name, each in values.items()}
    return found


def _with_sum(found: Mapping[str, Any], terms: Sequence[str]) -> dict[str, float | Tensor]:
    """Add "loss", the sum of all terms with items; nan if no term has an item."""
    of_terms = {name: found.get(name, math.nan) for name in terms}
    known = [each for each in of_terms.values() if not math.isnan(each)]
    return {**found, "loss": sum(known) if known else math.nan, **of_terms}


class _RankTotals:
    """Sums and counts over this rank's batches, for a loss or for metrics."""

    def __init__(self, step: Step, state: DistState, metric_fn: MetricFn | None) -> None:
        self._step, self._state, self._metric_fn = step, state, metric_fn
        self.totals: Totals = {}
        self.has_losses = metric_fn is None
        """Whether the totals hold the terms of a loss; `evaluate` then returns their sum too."""
        self.terms: Sequence[str] = step.plan.terms
        """The names of the terms of the loss."""
        self._has_means = False
        """Whether the loss function returned a metric that is a mean, and not a (sum, count)
        pair."""
        self._look = MetricsLook(step.plan, step.strategy, state, self._outputs_of(metric_fn))

    def cut_up(self, batch: Any) -> Any:
        """Cut a batch into micro-batches; for the plan's loss, compute their weights too."""
        plan = self._step.plan
        if self._metric_fn is None:
            return microbatches(plan, batch)[:2]
        return parts_with_rows(plan, batch)

    def add(self, each: CutBatch) -> None:
        """Add the results of a batch."""
        # Begin with NOTHING, which shows that there was a batch. A rank whose batches have no rows
        # calls no function, and learns no names of metrics.
        self.totals = added(self.totals, NOTHING)
        if self._metric_fn is None:
            self._add_losses(*each.parts)
        else:
            over_parts(self._step, self._state, self._metric_fn, each.parts, self._add_part)
        self._look.after(each.batch, has_means=self._has_means)

    def _outputs_of(self, metric_fn: MetricFn | None) -> Outputs | None:
        """Return a function with which `MetricsLook` runs a few rows; None for the plan's loss."""
        if metric_fn is None:
            return None
        plan, strategy = self._step.plan, self._step.strategy

        def outputs(rows: Any, weight: Weight) -> Outcome:
            call = partial(metric_fn, strategy.model)
            return _outcome(plan, *run_placed(self._state, plan, call, rows))

        return outputs

    def _add_losses(self, parts: Parts, weights: Weights) -> None:
        state, plan, strategy = self._state, self._step.plan, self._step.strategy
        parts, weights = strategy.pad(state, None, parts, weights)
        with settled(strategy, state):
            for part, weight in zip(parts, weights, strict=True):
                outcome = strategy.outputs(plan, state, part, weight)
                if weight:
                    self._add_outcome(outcome, weight, "loss_fn")

    def _add_outcome(self, outcome: Outcome, weight: Weight, function: str) -> None:
        """Add loss and metrics of a micro-batch to the totals."""
        pairs = counted_in(outcome[1])
        if pairs:
            self.terms = [name.removeprefix(COUNTED) for name in pairs]
        self._has_means |= not all(isinstance(each, tuple) for each in outcome[1].values())
        sums = _sums_of(self._step.plan, outcome, weight, function)
        self.totals = added(self.totals, totals_of(sums, None))

    def _add_part(self, part: Any, found: Any) -> None:
        """Add the result of `metric_fn` for a micro-batch."""
        if type(found) is not tuple or len(found) != 2:
            self.totals = added(self.totals, totals_of(found, num_rows(part)))
            return
        self.has_losses = True
        plan = self._step.plan
        (weight,) = weigh(plan.weight_fn, [part])
        if weight:
            self._add_outcome(_outcome(plan, *parted(found)), weight, "metric_fn")


def _outcome(plan: Plan, loss: Any, metrics: Any) -> Outcome:
    """Check the result of `metric_fn`, as the step checks the result of `loss_fn`."""
    pairs = {} if isinstance(loss, Tensor) or plan.terms else pairs_in(loss)
    if pairs:
        broken = broken_pair(pairs)
        if broken:
            raise LossError(f"evaluate: metric_fn must {broken}")
        return counted(pairs, metrics)
    broken = broken_rule(loss, plan.terms) if plan.terms else ""
    if not plan.terms and not is_mean(loss):
        broken = f"return (loss, metrics) with a 0-dim floating-point loss, got {kind_of(loss)}"
    if broken:
        raise LossError(f"evaluate: metric_fn must {broken}")
    loss = stacked([loss[name] for name in plan.terms]) if plan.terms else loss
    return loss, {} if metrics is None else checked_metrics(metrics, loss, plan.terms)


def _sums_of(plan: Plan, outcome: Outcome, weight: Weight, function: str) -> dict[str, Metric]:
    """Compute sums and counts of the loss and the metrics of a micro-batch."""
    loss, metrics = outcome
    sums: dict[str, Metric]
    if counted_in(metrics):
        sums = {}
    elif plan.terms:
        terms = zip(plan.terms, loss, weight, strict=True)
        sums = {name: _sum_of(mean, each) for name, mean, each in terms}
    elif plan.reduction == "sum":
        sums = {"loss": (loss, weight[0])}
    else:
        sums = {"loss": _sum_of(loss, weight[0])}
    for name, value in metrics.items():
        if isinstance(value, str):
            raise LossError(f"evaluate: {function} must {value}")
        if isinstance(value, tuple):
            sums[name.removeprefix(COUNTED)] = value
        else:
            # `weight` has one entry here: with several terms, all metrics are pairs.
            sums[name] = _sum_of(value, weight[0])
    return sums


def _sum_of(mean: Tensor, weight: float) -> Metric:
    """Convert a mean to a sum and its count; a mean of no items may be nan, but its sum is 0."""
    wide = widest(mean)
    assert wide is not None
    return (wide * weight if weight else 0.0), weight


@dataclass(frozen=True, slots=True)
class Total:
    """The running total of a metric, on the device: the host does not wait for it.

    Attributes:
        sum: int64 or float64, of any shape.
        count: int64 or float64, [] or of the sum's shape.
        num_ones: number of micro-batches, if each had several samples and a count of 1, which
            suggests means instead of sums; else 0.
    """

    sum: Tensor
    count: Tensor
    num_ones: int = 0

    def plus(self, other: Total) -> Total:
        """Return the sum of this total and another one."""
        num_ones = self.num_ones + other.num_ones if self.num_ones and other.num_ones else 0
        return Total(self.sum + other.sum, self.count + other.count, num_ones)


Totals = Mapping[str, Total]
NOTHING: Totals = {"loss": Total(torch.tensor(0), torch.tensor(0))}
"""The totals of a batch without items: `loss_fn` is not called, so its metrics are unknown."""


def totals_of(metrics: Any, rows: int | None) -> Totals:
    """Make totals of a micro-batch's metrics; `rows` is its number of samples, None if unknown."""
    if not isinstance(metrics, Mapping) or not metrics:
        rule, repair = (
            "return a mapping of names to values",
            'return {"name": values} or (loss, metrics)',
        )
        got = "an empty one" if isinstance(metrics, Mapping) else type(metrics).__name__
        raise ArgumentTypeError(message("evaluate", "metric_fn", rule, got, repair))
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
    """Convert a real number or tensor to an int64 or float64 tensor; return None for other values."""
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    if not isinstance(value, Tensor) or value.is_complex():
        return None
    tensor = _where_wide(value)
    return tensor.to(_widest_dtype(tensor))


def _where_wide(tensor: Tensor) -> Tensor:
    """Detach a tensor, and move it to the host if its device does not support float64."""
    return tensor.detach().cpu() if tensor.device.type == "mps" else tensor.detach()


def _widest_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.is_floating_point() else torch.int64


def _shown(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def added(totals: Totals, found: Totals) -> Totals:
    """Add the totals of two micro-batches; refuse different names or shapes of metrics."""
    if not totals or totals is NOTHING:
        return found
    if found is NOTHING:
        return totals
    if totals.keys() != found.keys():
        rule = f"give the same metrics for every batch, {sorted(totals)} before"
        raise ArgumentError(message("evaluate", "metric_fn", rule, sorted(found)))
    for name, new in found.items():
        before, shape = list(totals[name].sum.shape), list(new.sum.shape)
        if shape != before:
            rule = f"give {name!r} one shape for every batch, {before} before"
            raise ArgumentError(message("evaluate", "metric_fn", rule, shape))
    return {name: total.plus(found[name]) for name, total in totals.items()}


def means(every: Sequence[Totals], *, is_main: bool) -> dict[str, float | Tensor]:
    """Compute the means from the totals of all ranks, on the host, equal on every rank.

    The main rank warns about pairs (sum, count) that may hold a mean and 1.
    """
    # Leave out ranks that had no sample: their only entry is a loss with sum 0 and count 0. Do not
    # test the count alone: a loss may sum over all anchors, and count only the positive ones, of
    # which a rank with samples may have none.
    known = [
        {}
        if [*totals] == ["loss"] and not (totals["loss"].count.any() or totals["loss"].sum.any())
        else totals
        for totals in every
    ]
    every = known if any(known) else every
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


def _mean(name: str, total: Total) -> float | Tensor:
    if not bool(((total.count >= 0) & total.count.isfinite()).all()):
        rule = f"give {name!r} finite counts >= 0"
        raise ArgumentError(message("evaluate", "metric_fn", rule, total.count.tolist()))
    mean = (total.sum.double() / total.count).where(total.count > 0, torch.nan)
    return mean if mean.ndim else mean.item()
