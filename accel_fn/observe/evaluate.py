"""evaluate: metrics over a whole data set and all ranks, as one process would count them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from accel_fn.base.batch import num_samples
from accel_fn.base.rng import restored_random
from accel_fn.base.state import DistState
from accel_fn.base.weights import Weight
from accel_fn.comm import primitives
from accel_fn.comm.collectives import all_or_none
from accel_fn.data.loader import Epoch, ShardedLoader
from accel_fn.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchError,
    LossError,
    message,
)
from accel_fn.observe.metrics import NOTHING, Totals, added, means, totals_of, widest
from accel_fn.step.loss_module import Metrics, loss_module_of, run_forward, run_placed
from accel_fn.step.microbatches import cut, microbatches
from accel_fn.step.optimizer_modes import in_eval_mode
from accel_fn.step.plan import Plan
from accel_fn.step.step import Step

Metric = Tensor | tuple[float | Tensor, float | Tensor]
MetricFn = Callable[[Any, Any], Mapping[str, Metric]]


def evaluate(
    step: Step,
    loader: Iterable[Any],
    state: DistState,
    metric_fn: MetricFn | None = None,
    *,
    progress: bool | None = None,
) -> dict[str, float | Tensor]:
    """Compute metrics over every sample of a loader, once, and over all ranks: sums over counts.

    Runs with the step's placement, micro-batches and autocast, without
    gradients. Meanwhile the model is in evaluation mode, and so are optimizers that
    have train and eval modes, such as schedule-free ones. All ranks evaluate the model that
    `save_model` would write on the main rank, whose buffers may differ from those of other ranks, such as the
    running statistics of BatchNorm. Afterwards each rank's own buffers and the global random generators
    are as they were, so how often you evaluate does not change training. Ranks add
    up sums and counts, never means, so the result does not depend on how the
    samples are spread over batches and ranks.

    Law: the one-process figure, to rounding, for every world size and batch size.

    Args:
        step: from `build`.
        loader: from `shard_loader`, also through `prefetch` or `window`, or one of its
            epochs; in a world of one, any iterable of batches.
        state: as for the step; not changed.
        metric_fn: `(model, batch) -> {name: values}`, called on every micro-batch, which
            is on the device. Values are one a sample, [num_samples, ...], whole, real or bool, or
            a pair `(sum, count)`: numbers or tensors, the count [] or of the sum's shape. Names
            and shapes are the same for every batch. Default: the plan's loss over its weights, as "loss"
            (the mean of an item, also where `reduction` is "sum"; where `weight_fn` is a mapping,
            each term by its name, and their sum), and the metrics that `loss_fn` returns beside it.
        progress: a bar on the main rank. Default: where there is a terminal.

    Returns:
        The mean of every metric, on all ranks: a float, or a tensor in float64 on the host where
        values have trailing dimensions. nan where nothing was counted.

    Raises:
        ValueError: on every rank alike: values that are a mean already, of another length
            than the batch, or named otherwise from batch to batch; a loader without a batch,
            or, in a world of several, one that is not sharded; `local_sgd` between two averages.
        RuntimeError: on the other ranks, when one fails; names or shapes, also of buffers, differ
            between ranks.

    Cost: a forward a micro-batch, no collective and no host synchronisation among them (on MPS,
    which has no float64, one); at the end four small collectives on the host and one
    host synchronisation. In a world of several, if the model has buffers in its `state_dict`, before that
    a copy of these, two small collectives and one broadcast; not with `reproducible`.

    Note: sums are kept in float64, or in int64 where values are whole, so whole numbers are exact.

    >>> import torch, accel_fn as af
    >>> state, step = af.build(af.DistState(), af.Plan(loss_fn, model, optimizer))
    >>> def metric_fn(model, batch):
    ...     inputs, targets = batch
    ...     return {"close": (model(inputs) - targets).abs().squeeze(1) < 100}
    >>> af.evaluate(step, [batch], state, metric_fn)
    {'close': 1.0}
    """
    if not isinstance(step, Step):
        rule = "be what build gave"
        raise ArgumentTypeError(message("evaluate", "step", rule, type(step).__name__))
    step._check_state(state)

    def mine() -> Totals:
        _check_arguments(loader, state, metric_fn)
        bar = _bar(loader, state, progress)
        with restored_random(state.device):
            return _totals(step, loader, state, metric_fn, bar)

    with step.strategy.evaluating(step.plan, state, "evaluate"):
        totals = all_or_none(mine, state, "evaluate")
    found = means(primitives.exchange(totals, state, "evaluate"))
    return _with_sum(found, step.plan.terms) if metric_fn is None and step.plan.terms else found


def _with_sum(found: Mapping[str, Any], terms: Sequence[str]) -> dict[str, float | Tensor]:
    """Add the loss, the sum of those terms of which anything was counted; nan where nothing was."""
    of_terms = {name: found.get(name, math.nan) for name in terms}
    counted = [each for each in of_terms.values() if not math.isnan(each)]
    return {**found, "loss": sum(counted) if counted else math.nan, **of_terms}


def _check_arguments(loader: Iterable[Any], state: DistState, metric_fn: object) -> None:
    if metric_fn is not None and not callable(metric_fn):
        rule = "be a function (model, batch) -> {name: values}"
        raise ArgumentTypeError(message("evaluate", "metric_fn", rule, metric_fn))
    if state.world_size > 1 and not isinstance(loader, ShardedLoader | Epoch):
        rule = f"be shared out over {state.world_size} ranks"
        repair = "give it to shard_loader; every rank would count every sample"
        raise ArgumentError(message("evaluate", "loader", rule, type(loader).__name__, repair))


def _totals(
    step: Step,
    loader: Iterable[Any],
    state: DistState,
    metric_fn: MetricFn | None,
    bar: AbstractContextManager[Any],
) -> Totals:
    """The totals of this rank's part, on the host; none where it has no batch."""
    totals: Totals = {}
    batches = iter(loader)
    try:
        modes = in_eval_mode(step.plan.optimizers.values())
        with bar as shown, _evaluation_mode(step.strategy.loss_module), modes, torch.no_grad():
            for batch in batches:
                for found in _measured(step, state, metric_fn, batch):
                    totals = added(totals, found)
                if shown is not None:
                    shown.update()
    except Exception:
        if state.world_size > 1:  # a request of this rank may move items to other ranks
            with suppress(Exception):
                for _ in batches:
                    pass
        raise
    finally:
        del batches  # workers end with it, also where somebody keeps the error
    return {name: total.to_host() for name, total in totals.items()}


def _measured(
    step: Step, state: DistState, metric_fn: MetricFn | None, batch: Any
) -> Iterator[Totals]:
    """Sums and counts of every micro-batch."""
    plan, strategy = step.plan, step.strategy
    if metric_fn is None:
        parts, weights = strategy.pad(state, None, *microbatches(plan, batch))
        for part, weight in zip(parts, weights, strict=True):
            loss, metrics = run_forward(state, plan, strategy.loss_module, part, weight)
            if weight:
                yield totals_of(_sums_of(plan, loss, metrics, weight), None)
        strategy.settle(state)
        if not parts:
            yield NOTHING
        return
    model = loss_module_of(strategy.loss_module).model
    parts = cut(plan, batch)
    if not parts:
        yield NOTHING
    parts, mine = strategy.pad(state, None, parts, [1] * len(parts))
    for part, is_mine in zip(parts, mine, strict=True):
        found = run_placed(state, plan, lambda placed: metric_fn(model, placed), part)
        if is_mine:
            yield totals_of(found, _num_rows(part))
    strategy.settle(state)


def _sums_of(plan: Plan, loss: Tensor, metrics: Metrics, weight: Weight) -> dict[str, Metric]:
    """Sums and counts of what `loss_fn` returned for a micro-batch."""
    if isinstance(weight, tuple):
        terms = zip(plan.terms, loss, weight, strict=True)
        sums = {name: _sum_of(mean, each) for name, mean, each in terms}
    elif plan.reduction == "sum":
        sums = {"loss": (loss, weight)}
    else:
        sums = {"loss": _sum_of(loss, weight)}
    for name, value in metrics.items():
        if isinstance(value, str):
            raise LossError(f"evaluate: loss_fn must {value}")
        if isinstance(value, tuple):
            sums[name] = value
        else:
            assert not isinstance(weight, tuple)  # beside terms, metrics are pairs
            sums[name] = _sum_of(value, weight)
    return sums


def _sum_of(mean: Tensor, weight: float) -> Metric:
    """A mean as a sum and its count; that of nothing may be 0 / 0."""
    wide = widest(mean)
    assert wide is not None
    return (wide * weight if weight else 0.0), weight


def _num_rows(part: Any) -> int | None:
    """Samples of a micro-batch; None where they have no common leading dimension."""
    try:
        return num_samples(part)
    except BatchError:
        return None


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and as it was again."""
    before = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _bar(
    loader: Iterable[Any], state: DistState, progress: bool | None
) -> AbstractContextManager[Any]:
    """Progress display of an evaluation: tqdm's bar, or nothing."""
    wanted = sys.stderr.isatty() if progress is None else progress
    if not wanted or not state.is_main:
        return nullcontext()
    from tqdm import tqdm

    bar: AbstractContextManager[Any] = tqdm(
        total=_num_batches(loader), desc="evaluate", unit="batch", leave=False
    )
    return bar


def _num_batches(loader: Iterable[Any]) -> int | None:
    """Return the length of the loader, if it has one; an error in it must not end the evaluation."""
    try:
        return length_hint(loader) or None
    except Exception:
        return None
