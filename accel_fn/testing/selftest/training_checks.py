"""Checks of training: the library on all ranks against the loop that everybody writes, on one.

A check runs on every rank alike and gives the largest difference that this rank found.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_fn.base.split_batch import take_part
from accel_fn.base.state import DistState, LossScale
from accel_fn.base.weights import num_labels, weigh
from accel_fn.comm.dtensor import whole
from accel_fn.comm.primitives import exchange
from accel_fn.step.build import build
from accel_fn.step.plan import Plan
from accel_fn.step.transform import Transform, compose
from accel_fn.transforms.accumulate.accumulate import accumulate
from accel_fn.transforms.amp.amp import with_amp
from accel_fn.transforms.clip import clip
from accel_fn.transforms.ddp.ddp import wrap_ddp
from accel_fn.transforms.fsdp.fsdp import wrap_fsdp
from accel_fn.transforms.place import place
from accel_fn.transforms.schedule.schedule import schedule
from accel_fn.transforms.skip import skip_nonfinite

_MAX_NORM, _IGNORED, _SCALE = 0.5, -100, 1024.0
_SIZES = (7, 6, 5, 9, 2)
"""Sizes of global batches: odd ones, and a last one without a sample for a third rank."""


def exact_dtype(state: DistState) -> torch.dtype:
    """Return double precision, if the device has it."""
    return torch.float32 if state.device.type == "mps" else torch.float64


def largest(found: Tensor, expected: Tensor) -> float:
    found, expected = found.cpu().double(), expected.cpu().double()
    return float((found - expected).abs().max()) if found.numel() else 0.0


def drawn(*shape: int, seed: int, state: DistState, dtype: torch.dtype | None = None) -> Tensor:
    """Draw the same numbers on every rank, whatever its device."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return drawn.to(dtype or exact_dtype(state)).to(state.device)


def small_model(
    state: DistState, num_outputs: int = 1, dtype: torch.dtype | None = None
) -> nn.Module:
    """Make a small network, the same on every rank."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, num_outputs))
    model.to(dtype or exact_dtype(state)).to(state.device)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=seed, state=state, dtype=dtype))
    return model


def _batches(state: DistState, dtype: torch.dtype | None = None) -> list[Any]:
    return [
        (
            drawn(size, 3, seed=100 + size, state=state, dtype=dtype),
            drawn(size, 1, seed=200 + size, state=state, dtype=dtype),
        )
        for size in _SIZES
    ]


def _mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _by_tokens(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["inputs"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=_IGNORED)


def flat(model: nn.Module) -> Tensor:
    """Join all parameters; if they are in shards, every rank calls it."""
    return torch.cat([whole(parameter).flatten() for parameter in model.parameters()])


def sgd(model: nn.Module) -> Optimizer:
    """Make SGD, since Adam hides gradients that are wrong by a factor."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _constant(num_updates: int) -> float:
    return 1.0


def train_by_hand(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Sequence[Any],
    *,
    max_norm: float | None = None,
    autocast: torch.autocast | None = None,
    rate: Callable[[int], float] = _constant,
) -> Tensor:
    """Train by the loop that everybody writes, over global batches; return the last parameters."""
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for batch in batches:
        with autocast or nullcontext():
            loss = loss_fn(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return flat(model)


def _trained(
    state: DistState,
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Sequence[Any],
    *transforms: Transform,
    wrapping: Transform | None = None,
    **plan_options: Any,
) -> Tensor:
    """The same by the library: each rank has its part of every batch.

    Ranks start from parameters of their own, of which `build` must take those of rank 0. Not a
    number where a report is not that of the global batch.
    """
    optimizer, other = sgd(model), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(state.rank)
    recipe = compose(place(), wrapping or wrap_ddp(), *transforms)
    plan = recipe(Plan(loss_fn, model, optimizer, **plan_options))
    state, step = build(state, plan)
    reports = []
    for batch in batches:
        state, report = step(state, take_part(batch, state.rank, state.world_size))
        reports.append(report)
    bound = 1e-5 if next(model.parameters()).dtype == exact_dtype(state) else 2e-2
    loss = float(loss_fn(other, batches[0]).detach())
    is_right = abs(float(reports[0].loss) - loss) <= bound * (1 + abs(loss)) and all(
        report.weight == weigh(plan.weight_fn, [batch])[0]
        for report, batch in zip(reports, batches, strict=True)
    )
    return flat(model) if is_right else flat(model) * float("nan")


def check_ranks(state: DistState) -> float:
    expected = train_by_hand(small_model(state), _mse, _batches(state))
    return largest(_trained(state, small_model(state), _mse, _batches(state)), expected)


def check_clipping(state: DistState) -> float:
    expected = train_by_hand(small_model(state), _mse, _batches(state), max_norm=_MAX_NORM)
    found = _trained(state, small_model(state), _mse, _batches(state), clip(_MAX_NORM))
    return largest(found, expected)


def check_fsdp(state: DistState) -> float:
    """Check shards, also with unequal numbers of micro-batches, and the norm of all shards."""
    expected = train_by_hand(small_model(state), _mse, _batches(state), max_norm=_MAX_NORM)
    transforms = accumulate(3), clip(_MAX_NORM)
    model = small_model(state)
    found = _trained(state, model, _mse, _batches(state), *transforms, wrapping=wrap_fsdp())
    return largest(found, expected)


def check_microbatches(state: DistState) -> float:
    expected = train_by_hand(small_model(state), _mse, _batches(state))
    found = [
        _trained(state, small_model(state), _mse, _batches(state), accumulate(k))
        for k in (1, 3, 50)
    ]
    return largest(torch.stack(found), expected)


def check_tokens(state: DistState) -> float:
    """Check parts of one batch that have different numbers of labels, down to none."""
    batches = []
    for size in _SIZES:
        labels = torch.arange(size * 4).reshape(size, 4) % 5
        labels[torch.arange(size)[:, None] > torch.arange(1, 5)] = _IGNORED
        inputs = drawn(size, 4, 3, seed=300 + size, state=state)
        batches.append({"inputs": inputs, "labels": labels.to(state.device)})
    expected = train_by_hand(small_model(state, 5), _by_tokens, batches)
    weight_fn = num_labels("labels", ignore_index=_IGNORED)
    model = small_model(state, 5)
    found = _trained(state, model, _by_tokens, batches, accumulate(2), weight_fn=weight_fn)
    return largest(found, expected)


def check_scaling(state: DistState) -> float:
    def scale(state: DistState) -> DistState:
        return replace(state, scaler=LossScale.start(_SCALE, device=state.device))

    def scaled(plan: Plan) -> Plan:
        return replace(plan, init_state=(*plan.init_state, scale))

    expected = train_by_hand(small_model(state), _mse, _batches(state))
    return largest(_trained(state, small_model(state), _mse, _batches(state), scaled), expected)


def check_schedule(state: DistState) -> float:
    """Check that the rate follows applied updates: one batch is skipped, and ranks must not multiply it."""
    batches = _batches(state)
    expected = train_by_hand(small_model(state), _mse, batches, rate=_falling)
    inputs, targets = batches[1]
    batches.insert(1, (inputs * float("inf"), targets))
    transforms = accumulate(2), skip_nonfinite(), schedule(_falling)
    return largest(_trained(state, small_model(state), _mse, batches, *transforms), expected)


def _falling(num_updates: int) -> float:
    return 1.0 / (1 + num_updates)


def check_bf16(state: DistState) -> float:
    """Check bf16 to its rounding, and that replicas stay equal to the bit."""
    single = torch.float32
    batches = _batches(state, single)
    casting = torch.autocast(state.device.type, torch.bfloat16)
    expected = train_by_hand(small_model(state, dtype=single), _mse, batches, autocast=casting)
    found = _trained(state, small_model(state, dtype=single), _mse, batches, with_amp("bf16"))
    apart = max(largest(found.cpu(), other) for other in exchange(found.cpu(), state, "check"))
    return largest(found, expected) if apart == 0 else float("inf")


def check_overflow(state: DistState) -> float:
    """Check that all ranks skip an update if only the last rank has a batch that is not finite."""
    model = small_model(state, dtype=torch.float32)
    optimizer = sgd(model)
    recipe = compose(place(), wrap_ddp(), with_amp("fp16", init_scale=_SCALE))
    state, step = build(state, recipe(Plan(_mse, model, optimizer)))
    inputs = drawn(4, 3, seed=1, state=state, dtype=torch.float32)
    if state.rank == state.world_size - 1:
        inputs = inputs * float("inf")
    before = flat(model)
    state, report = step(state, (inputs, inputs[:, :1].nan_to_num(0, 0, 0)))
    assert report.applied is not None
    assert state.scaler is not None
    skipped = largest(flat(model), before) + float(report.applied)
    finite = drawn(4, 3, seed=1, state=state, dtype=torch.float32)
    scale = abs(float(state.scaler.scale) - _SCALE / 2)
    state, report = step(state, (finite, finite[:, :1]))
    assert report.applied is not None
    return skipped + scale + float(not report.applied) + float(torch.equal(flat(model), before))
