"""The promises that `accel-fn test` checks: a table with a check for each, over a real world.

A check runs on every rank and returns this rank's error as a number; 0 means correct.
"""

from __future__ import annotations

import copy
import math
import socket
import traceback
from collections.abc import Callable, Iterable, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from accel_fn.checkpoint.build import build
from accel_fn.core.batch import count_samples
from accel_fn.core.collectives import broadcast
from accel_fn.core.dtensor import whole
from accel_fn.core.plan import Plan
from accel_fn.core.primitives import exchange
from accel_fn.core.split_batch import take_part
from accel_fn.core.state import DistState, LossScale
from accel_fn.core.transform import Transform, compose
from accel_fn.core.weights import count_labels, weigh
from accel_fn.data.shard_loader import shard_loader
from accel_fn.errors import RankError
from accel_fn.parallel.ddp import wrap_ddp
from accel_fn.parallel.fsdp.fsdp import wrap_fsdp
from accel_fn.parallel.gather import gather
from accel_fn.parallel.reduce import reduce_mean, reduce_sum
from accel_fn.transforms.accumulate.accumulate import accumulate
from accel_fn.transforms.amp.amp import with_amp
from accel_fn.transforms.clip import clip
from accel_fn.transforms.place import place
from accel_fn.transforms.schedule.schedule import schedule
from accel_fn.transforms.skip import skip_nonfinite

_MAX_NORM, _IGNORED, _SCALE = 0.5, -100, 1024.0
_SIZES = (7, 6, 5, 9, 2)
"""The sizes of global batches: odd sizes, and a last batch without a sample for a third rank."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise, the largest difference that rounding explains, and a function to measure it."""

    words: str
    bound: float
    check: Callable[[DistState], float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The largest difference that any rank found for a promise, and the bound on it."""

    promise: str
    bound: float
    largest: float

    @property
    def holds(self) -> bool:
        """Return whether the difference is within the bound; nan is not."""
        return self.largest <= self.bound


def check_promises(
    state: DistState, show: Callable[[Verdict], None] = lambda _: None
) -> list[Verdict]:
    """Check all promises on every rank of a world; call `show` with each verdict as soon as it is known."""
    verdicts = []
    for promise in promises(state):
        try:
            found = promise.check(state)
        except Exception as error:
            raise RankError(
                f"test: the check that {promise.words} failed on rank {state.rank}\n"
                + "".join(traceback.format_exception(error))
            ) from None
        # Use torch's max: Python's may drop a nan.
        largest = float(torch.tensor(exchange(found, state, "test"), dtype=torch.float64).max())
        verdicts.append(Verdict(promise.words, promise.bound, largest))
        show(verdicts[-1])
    return verdicts


def _exact_dtype(state: DistState) -> torch.dtype:
    """Return double precision, or single if the device does not support it."""
    return torch.float32 if state.device.type == "mps" else torch.float64


def _largest(found: Tensor, expected: Tensor) -> float:
    found, expected = found.cpu().double(), expected.cpu().double()
    return float((found - expected).abs().max()) if found.numel() else 0.0


def _drawn(*shape: int, seed: int, state: DistState, dtype: torch.dtype | None = None) -> Tensor:
    """Draw the same numbers on every rank, on any device."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return drawn.to(dtype or _exact_dtype(state)).to(state.device)


def _small_model(
    state: DistState, num_outputs: int = 1, dtype: torch.dtype | None = None
) -> nn.Module:
    """Make a small network that is equal on every rank."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, num_outputs))
    model.to(dtype or _exact_dtype(state)).to(state.device)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(_drawn(*parameter.shape, seed=seed, state=state, dtype=dtype))
    return model


def _pairs(state: DistState, dtype: torch.dtype | None = None) -> list[Any]:
    return [
        (
            _drawn(size, 3, seed=100 + size, state=state, dtype=dtype),
            _drawn(size, 1, seed=200 + size, state=state, dtype=dtype),
        )
        for size in _SIZES
    ]


def _pairs_and_an_overflow(state: DistState, dtype: torch.dtype | None = None) -> list[Any]:
    first, second, *others = _pairs(state, dtype)
    return [first, (second[0] * float("inf"), second[1]), second, *others]


def _tokens(state: DistState, dtype: torch.dtype | None = None) -> list[Any]:
    """Make batches whose samples have different numbers of labels; some samples have none."""
    batches = []
    for size in _SIZES:
        labels = torch.arange(size * 4).reshape(size, 4) % 5
        labels[torch.arange(size)[:, None] > torch.arange(1, 5)] = _IGNORED
        inputs = _drawn(size, 4, 3, seed=300 + size, state=state, dtype=dtype)
        batches.append({"inputs": inputs, "labels": labels.to(state.device)})
    return batches


def _mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _by_tokens(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["inputs"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=_IGNORED)


def _flat(model: nn.Module) -> Tensor:
    """Join all parameters; if they are sharded, every rank must call this."""
    return torch.cat([whole(parameter).flatten() for parameter in model.parameters()])


def _sgd(model: nn.Module) -> Optimizer:
    """Make SGD: Adam would hide gradients that are wrong by a factor."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _constant(num_updates: int) -> float:
    return 1.0


def _falling(num_updates: int) -> float:
    return 1.0 / (1 + num_updates)


def _scaled(plan: Plan) -> Plan:
    def scale(state: DistState) -> DistState:
        return replace(state, scaler=LossScale.start(_SCALE, device=state.device))

    return replace(plan, init_state=(*plan.init_state, scale))


def _train_by_hand(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    *,
    max_norm: float = math.inf,
    autocast: torch.autocast | None = None,
    rate: Callable[[int], float] = _constant,
) -> Tensor:
    """Train by the usual loop; skip batches whose loss is not finite; return the last parameters."""
    optimizer = _sgd(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for batch in batches:
        with autocast or nullcontext():
            loss = loss_fn(model, batch)
        if not loss.isfinite():
            continue
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return _flat(model)


def _training(
    state: DistState,
    *transforms: Transform,
    wrapping: Transform | None = None,
    loss_fn: Callable[[nn.Module, Any], Tensor] = _mse,
    weight_fn: Callable[[Any], Any] = count_samples,
    num_outputs: int = 1,
    draw: Callable[[DistState, torch.dtype | None], list[Any]] = _pairs,
    dtype: torch.dtype | None = None,
    **by_hand: Any,
) -> float:
    """Train with the library on all ranks and by hand on one; return the largest difference.

    The difference is that of parameters. It is infinity if the ranks' parameters differ, and nan if
    a report is not that of the global batch.
    """
    batches, model = draw(state, dtype), _small_model(state, num_outputs, dtype)
    by_one = copy.deepcopy(model)
    loss = float(loss_fn(by_one, batches[0]).detach())
    expected = _train_by_hand(by_one, loss_fn, batches, **by_hand)
    optimizer = _sgd(model)
    # Ranks start from different parameters, since `build` must copy those of rank 0.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(state.rank)
    recipe = compose(place(), wrapping or wrap_ddp(), *transforms)
    plan = recipe(Plan(loss_fn, model, optimizer, weight_fn=weight_fn))
    state, step = build(plan, state)
    reports = []
    for batch in batches:
        state, report = step(state, take_part(batch, state.rank, state.world_size))
        reports.append(report)
    # Reports hold losses in float32, and only the check of bf16 gives a `dtype`. Both set this bound.
    bound = 1e-5 if dtype is None else 2e-2
    is_right = abs(float(reports[0].loss) - loss) <= bound * (1 + abs(loss)) and all(
        report.weight == sum(weigh(plan.weight_fn, [batch])[0])
        for report, batch in zip(reports, batches, strict=True)
    )
    found = _flat(model).cpu()
    if any(_largest(found, other) for other in exchange(found, state, "check")):
        return math.inf
    return _largest(found, expected) if is_right else math.nan


def _microbatches(state: DistState) -> float:
    found = [_training(state, accumulate(k)) for k in (1, 3, 50)]
    # Use torch's max: Python's may drop a nan.
    return float(torch.tensor(found).max())


def _bf16(state: DistState) -> float:
    autocast = torch.autocast(state.device.type, torch.bfloat16)
    return _training(state, with_amp("bf16"), dtype=torch.float32, autocast=autocast)


def _overflow(state: DistState) -> float:
    """Check that all ranks skip only the update in which the last rank has a batch that is not finite."""
    model = _small_model(state, dtype=torch.float32)
    optimizer = _sgd(model)
    recipe = compose(place(), wrap_ddp(), with_amp("fp16", init_scale=_SCALE))
    state, step = build(recipe(Plan(_mse, model, optimizer)), state)
    finite = _drawn(4, 3, seed=1, state=state, dtype=torch.float32)
    is_last = state.rank == state.world_size - 1
    inputs, targets = finite * float("inf") if is_last else finite, finite[:, :1]
    before = _flat(model)
    state, report = step(state, (inputs, targets))
    assert report.applied is not None
    assert state.scaler is not None
    skipped = _largest(_flat(model), before) + float(report.applied)
    scale = abs(float(state.scaler.scale) - _SCALE / 2)
    state, report = step(state, (finite, targets))
    assert report.applied is not None
    return skipped + scale + float(not report.applied) + float(torch.equal(_flat(model), before))


def _loader(state: DistState) -> DataLoader[Any]:
    """Make a shuffled loader whose last batch is smaller than the others."""
    batch_size = 3 * state.world_size + 1
    size = 3 * batch_size + 2 * state.world_size
    data = TensorDataset(torch.arange(size), _drawn(size, 3, seed=5, state=state).cpu())
    return DataLoader(data, batch_size=batch_size, shuffle=True)


def _one_rank(state: DistState) -> DistState:
    return DistState(device=state.device, seed=state.seed)


def _shards(state: DistState) -> float:
    """Count wrong batches of two epochs, and epochs that do not cover the data set."""
    loader, wrong = _loader(state), 0
    sharded, unsharded = shard_loader(loader, state), shard_loader(loader, _one_rank(state))
    for epoch, one in zip(sharded.epochs(2), unsharded.epochs(2), strict=True):
        parts = exchange([batch[0] for batch in epoch], state, "check")
        joined = [torch.cat(batch) for batch in zip(*parts, strict=False)]
        expected = [batch[0] for batch in one]
        wrong += sum(abs(len(part) - len(expected)) for part in parts)
        wrong += _num_unequal(joined, expected)
        size = len(cast("Sized", loader.dataset))
        wrong += not torch.equal(torch.cat(joined).sort().values, torch.arange(size))
    return float(wrong)


def _num_unequal(some: Sequence[Tensor], others: Sequence[Tensor]) -> int:
    return sum(not torch.equal(one, other) for one, other in zip(some, others, strict=False))


def _resuming(state: DistState) -> float:
    """Count the batches that are wrong in a run that stops in the middle and resumes."""
    sharded = shard_loader(_loader(state), state)
    every = [batch[0] for epoch in sharded.epochs(2) for batch in epoch]
    stopped = replace(state, step=2)
    rest = [batch[0] for epoch in sharded.epochs(2, since=stopped) for batch in epoch]
    return float(_num_unequal(every[2:], rest) + abs(len(every) - 2 - len(rest)))


def _loading(state: DistState) -> float:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        inputs = batch[1].to(state.device)
        return F.mse_loss(model(inputs), inputs[:, :1])

    loader = _loader(state)
    batches = shard_loader(loader, _one_rank(state))
    expected = _train_by_hand(_small_model(state), loss_fn, batches)
    model = _small_model(state)
    optimizer = _sgd(model)
    recipe = compose(place(), wrap_ddp(), accumulate(2))
    running, step = build(recipe(Plan(loss_fn, model, optimizer)), state)
    for batch in shard_loader(loader, state):
        running, _ = step(running, batch)
    return _largest(_flat(model), expected)


def _gather(state: DistState) -> float:
    """Gather a different number of rows from each rank, none from rank 0; return the largest error."""
    rows = torch.arange(
        state.rank * (state.rank + 1) // 2, (state.rank + 1) * (state.rank + 2) // 2
    )
    if state.rank == 0:
        rows = rows[:0]
    total = state.world_size * (state.world_size + 1) // 2
    found = gather(rows.to(state.device), state).cpu()
    expected = torch.arange(1, total)
    return _largest(found, expected) if found.shape == expected.shape else float(total)


def _reduce(state: DistState) -> float:
    """Reduce integers, a tensor and a mean, and broadcast from the last rank; add up the errors."""
    ranks, last = range(state.world_size), state.world_size - 1
    number = reduce_sum(2**40 + state.rank, state)
    off = float(abs(number - sum(2**40 + rank for rank in ranks)))
    off += _largest(reduce_sum(_ones(state) * state.rank, state), _ones(state) * sum(ranks))
    if last:
        mean = reduce_mean(float(state.rank), state, weight=state.rank)
        off += abs(mean - sum(rank * rank for rank in ranks) / sum(ranks))
    number, tensor = broadcast((state.rank, _ones(state) * state.rank), state, source=last)
    return off + abs(number - last) + _largest(tensor, _ones(state) * last)


def _ones(state: DistState) -> Tensor:
    return torch.ones(1000, device=state.device)


def _devices(state: DistState) -> float:
    """Count ranks that share an accelerator; add the error of a sum by the device's own backend."""
    device = state.device
    places = exchange((socket.gethostname(), device.type, device.index), state, "check")
    shared = 0 if device.type == "cpu" else len(places) - len(set(places))
    total = reduce_sum(_ones(state) * (state.rank + 1), state)
    expected = _ones(state) * sum(range(1, state.world_size + 1))
    return shared + _largest(total, expected)


def _trains(*transforms: Transform, **options: Any) -> Callable[[DistState], float]:
    return lambda state: _training(state, *transforms, **options)


def promises(state: DistState) -> tuple[Promise, ...]:
    """List all promises for a world on the devices of this state."""
    rounding = 1e-9 if _exact_dtype(state) == torch.float64 else 1e-4
    return (
        Promise("ranks are on devices of their own, and their sums are right", 0, _devices),
        Promise("W ranks train as one", rounding, _trains()),
        Promise(
            "shards train as one",
            rounding,
            # Some ranks have fewer than three rows, so ranks have unequal numbers of micro-batches.
            _trains(accumulate(3), clip(_MAX_NORM), wrapping=wrap_fsdp(), max_norm=_MAX_NORM),
        ),
        Promise(
            "clipping is by the norm of all ranks",
            rounding,
            _trains(clip(_MAX_NORM), max_norm=_MAX_NORM),
        ),
        Promise("micro-batches change nothing", rounding, _microbatches),
        Promise(
            "tokens of all ranks have equal weights",
            rounding,
            _trains(
                accumulate(2),
                loss_fn=_by_tokens,
                weight_fn=count_labels("labels", ignore_index=_IGNORED),
                num_outputs=5,
                draw=_tokens,
            ),
        ),
        Promise("a loss scale changes nothing", rounding, _trains(_scaled)),
        Promise(
            "a schedule follows the updates that are made",
            rounding,
            _trains(
                accumulate(2),
                skip_nonfinite(),
                schedule(_falling),
                draw=_pairs_and_an_overflow,
                rate=_falling,
            ),
        ),
        Promise("bf16 trains as one rank's bf16", 2e-2, _bf16),
        Promise("an fp16 overflow on one rank skips the update on all", 0, _overflow),
        Promise("shards partition every epoch, in one order", 0, _shards),
        Promise("a run resumes where it stopped", 0, _resuming),
        Promise("training through shard_loader is training through the loader", rounding, _loading),
        Promise("gather gives the order of the data set", 0, _gather),
        Promise("reduce and broadcast give what one process has", rounding, _reduce),
    )
