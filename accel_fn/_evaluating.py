"""evaluate: metrics over a whole data set and all ranks, as one process would count them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel_fn import _comm
from accel_fn._batch import num_samples
from accel_fn._collectives import all_or_none
from accel_fn._errors import ArgumentError, ArgumentTypeError, BatchError, ReplicaError, message
from accel_fn._forward import run_forward, run_placed
from accel_fn._microbatches import cut
from accel_fn._plan import Plan
from accel_fn._state import DistState
from accel_fn._step import Step
from accel_fn.data._loader import Epoch, ShardedLoader

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
    """Metrics over every sample of a loader, once, and over all ranks: sums over counts.

    Runs under the step's placement, micro-batches and autocast, without
    gradients, with the model in evaluation mode for the time being. Ranks add
    up sums and counts, never means, so the result does not depend on how the
    samples are spread over batches and ranks.

    Law: the one-process figure, to rounding, for every world size and batch size.

    Args:
        step: as `build` gave it.
        loader: what `shard_loader` gave, or `prefetch` of it; in a world of one
            anything that gives batches.
        state: as for the step; not changed.
        metric_fn: `(model, batch) -> {name: values}`, called on every micro-batch, which
            is on the device. Values are one a sample, [num_samples, ...], of any dtype, or
            a pair `(sum, count)`. Default: the plan's loss over its weights, as "loss".
        progress: a bar on the main rank. Default: where there is a terminal and tqdm.

    Returns:
        The mean of every metric, on all ranks: a float, or a tensor in float64 where
        values have trailing dimensions. nan where nothing was counted.

    Raises:
        ValueError: on every rank alike: values that are a mean already, of another length
            than the batch, or named otherwise from batch to batch; in a world of several,
            a loader that is not shared out.
        RuntimeError: on the other ranks, when one fails.

    Cost: a forward a micro-batch; at the end two small collectives, two
    all-reduces of a number a metric, and one host synchronisation.

    >>> import torch, accel_fn as af
    >>> state, step = af.build(af.DistState(), af.Plan(loss_fn, model, optimizer))
    >>> def metric_fn(model, batch):
    ...     inputs, targets = batch
    ...     return {"close": (model(inputs) - targets).abs().squeeze(1) < 100}
    >>> af.evaluate(step, [batch], state, metric_fn)
    {'close': 1.0}
    """
    step._check_state(state)
    if state.world_size > 1 and not isinstance(loader, ShardedLoader | Epoch):
        rule = f"be shared out over {state.world_size} ranks"
        repair = "give it to shard_loader; every rank would count every sample"
        raise ArgumentError(message("evaluate", "loader", rule, type(loader).__name__, repair))
    bar = _bar(loader, state, progress)
    tally = all_or_none(lambda: _count(step, loader, state, metric_fn, bar), state, "evaluate")
    return _reduced(tally, state)


@dataclass(slots=True)
class _Total:
    """What one metric has come to on this rank: tensors on the device, so that nobody waits."""

    sum: Tensor
    count: float | Tensor


def _count(
    step: Step,
    loader: Iterable[Any],
    state: DistState,
    metric_fn: MetricFn | None,
    bar: Callable[[Iterable[Any]], Iterable[Any]],
) -> dict[str, _Total]:
    """The totals of this rank's part."""
    totals: dict[str, _Total] = {}
    batches = iter(loader)
    try:
        with _evaluation_mode(step.plan.model), torch.no_grad():
            for batch in bar(batches):
                for found in _metrics(step, state, metric_fn, batch):
                    _add(totals, found)
    except Exception:
        if state.world_size > 1:  # the loader may deal to others what this rank asks for
            for _ in batches:
                pass
        raise
    return totals


def _metrics(
    step: Step, state: DistState, metric_fn: MetricFn | None, batch: Any
) -> Iterator[dict[str, _Total]]:
    """Sums and counts of every micro-batch."""
    plan = step.plan
    if metric_fn is None:
        for part, weight in zip(*cut(plan, batch), strict=True):
            loss = run_forward(state, plan, step._module, part)
            yield {"loss": _Total(_wide(loss) * weight, weight)}
        return
    for part in plan.split[0](batch) if plan.split else (batch,):
        found = run_placed(state, plan, lambda placed: metric_fn(plan.model, placed), part)
        if not isinstance(found, Mapping):
            rule = "return a mapping of names to values"
            raise ArgumentTypeError(
                message("evaluate", "metric_fn", rule, type(found).__name__, 'say {"name": values}')
            )
        rows = _num_rows(plan, part)
        yield {name: _total(name, value, rows) for name, value in found.items()}


def _num_rows(plan: Plan, part: Any) -> int | None:
    """Samples of a micro-batch; None where they have no common leading dimension."""
    try:
        return num_samples(part)
    except BatchError:
        return None


def _total(name: str, value: Any, rows: int | None) -> _Total:
    """What one metric of one micro-batch adds."""
    if isinstance(value, tuple) and len(value) == 2:
        total, count = (each.detach() if isinstance(each, Tensor) else each for each in value)
        if not isinstance(count, Tensor | int | float) or (
            isinstance(count, Tensor) and count.ndim
        ):
            raise ArgumentError(f"evaluate: metric_fn must give {name!r} a count, got {count!r}")
        return _Total(_wide(torch.as_tensor(total)), count)
    if not isinstance(value, Tensor) or value.ndim == 0 or value.size(0) != rows:
        got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        wanted = f"[{rows}, ...], or " if rows is not None else ""
        repair = (
            "values that are a mean already cannot be averaged, since a mean of means is not the mean"
            if not isinstance(value, Tensor) or value.ndim == 0
            else "what is not one value a sample needs a count of its own"
        )
        raise ArgumentError(
            f"evaluate: metric_fn must give {name!r} as one value a sample, {wanted}(sum, count), "
            f"got {got}; {repair}"
        )
    return _Total(_wide(value.detach()).sum(dim=0), value.size(0))


def _wide(value: Tensor) -> Tensor:
    """In int64 where numbers are whole, else in float64, on the host where the device has none."""
    if not (value.is_floating_point() or value.is_complex()):
        return value.long()
    return value.cpu().double() if value.device.type == "mps" else value.double()


def _add(totals: dict[str, _Total], found: dict[str, _Total]) -> None:
    if totals and totals.keys() != found.keys():
        rule = f"give the same metrics for every batch, {sorted(totals)} before"
        raise ArgumentError(message("evaluate", "metric_fn", rule, sorted(found)))
    for name, new in found.items():
        old = totals.get(name)
        if old is None:
            totals[name] = new
        elif old.sum.shape != new.sum.shape:
            rule = f"give {name!r} one shape for every batch, {list(old.sum.shape)} before"
            raise ArgumentError(message("evaluate", "metric_fn", rule, list(new.sum.shape)))
        else:
            totals[name] = _Total(old.sum + new.sum, old.count + new.count)


def _reduced(totals: dict[str, _Total], state: DistState) -> dict[str, float | Tensor]:
    """The means over all ranks, by one sum of whole numbers and one of others."""
    mine = {name: (list(total.sum.shape), total.sum.dtype) for name, total in totals.items()}
    every = _comm.exchange(mine, state, "evaluate")
    known: dict[str, Any] = next((each for each in every if each), {})
    for rank, theirs in enumerate(every):
        if theirs and theirs != known:
            raise ReplicaError(
                f"evaluate: metric_fn must give the same metrics on every rank, got {theirs} on rank "
                f"{rank} and {known} elsewhere"
            )
    means: dict[str, float | Tensor] = {}
    sums = {
        name: totals[name].sum.cpu() if name in totals else torch.zeros(shape, dtype=dtype)
        for name, (shape, dtype) in known.items()
    }
    counts = {
        name: torch.as_tensor(totals[name].count if name in totals else 0).cpu().double()
        for name in known
    }
    for dtype in (torch.int64, torch.float64):
        names = [name for name in known if sums[name].dtype == dtype]
        _sum_over_ranks([sums[name] for name in names], state)
    _sum_over_ranks(list(counts.values()), state)
    for name in known:
        mean = sums[name].double() / counts[name]
        means[name] = mean if mean.ndim else float(mean)
    return means


def _sum_over_ranks(tensors: list[Tensor], state: DistState) -> None:
    """Sums of host tensors of one dtype, in place, by one all-reduce."""
    if not tensors or state.world_size == 1:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    _comm.start_sum(flat, state, "evaluate").wait()
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, found in zip(tensors, torch.split(flat, sizes), strict=True):
        tensor.copy_(found.view_as(tensor))


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and as it was again."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _bar(
    loader: Iterable[Any], state: DistState, progress: bool | None
) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """What shows how far an evaluation is: tqdm's bar, or nothing."""
    found = importlib.util.find_spec("tqdm") is not None
    if progress and not found:
        raise ArgumentError(
            "evaluate: progress=True must have tqdm, which is not installed; pip install tqdm"
        )
    wanted = sys.stderr.isatty() and found if progress is None else progress
    if not wanted or not state.is_main:
        return lambda batches: batches
    try:
        length: int | None = len(loader)  # type: ignore[arg-type]
    except TypeError:
        length = None
    tqdm = importlib.import_module("tqdm").tqdm
    return lambda batches: tqdm(batches, total=length, unit="batch", leave=False)
