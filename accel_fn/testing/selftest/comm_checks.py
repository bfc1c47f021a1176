"""Checks of devices, data and messages between ranks.

A check runs on every rank alike and gives how much this rank found to be wrong.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence, Sized
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_fn.base.state import DistState
from accel_fn.comm.collectives import broadcast
from accel_fn.comm.gather import gather
from accel_fn.comm.primitives import exchange
from accel_fn.comm.reduce import reduce_mean, reduce_sum
from accel_fn.data.shard_loader import shard_loader
from accel_fn.step.build import build
from accel_fn.step.plan import Plan
from accel_fn.step.transform import compose
from accel_fn.testing.selftest.training_checks import (
    drawn,
    flat,
    largest,
    sgd,
    small_model,
    train_by_hand,
)
from accel_fn.transforms.accumulate.accumulate import accumulate
from accel_fn.transforms.ddp.ddp import wrap_ddp
from accel_fn.transforms.place import place


def _loader(state: DistState) -> DataLoader[Any]:
    """Make a shuffled loader whose last batch is smaller than the others."""
    batch_size = 3 * state.world_size + 1
    size = 3 * batch_size + 2 * state.world_size
    data = TensorDataset(torch.arange(size), drawn(size, 3, seed=5, state=state).cpu())
    return DataLoader(data, batch_size=batch_size, shuffle=True)


def _alone(state: DistState) -> DistState:
    """Run the same function on one rank."""
    return DistState(device=state.device, seed=state.seed)


def check_shards(state: DistState) -> float:
    """Count batches of two epochs that are not their ranks' parts, and epochs that are not the data set."""
    loader, wrong = _loader(state), 0
    sharded, whole = shard_loader(loader, state), shard_loader(loader, _alone(state))
    for epoch, one in zip(sharded.epochs(2), whole.epochs(2), strict=True):
        parts = exchange([batch[0] for batch in epoch], state, "check")
        joined = [torch.cat(batch) for batch in zip(*parts, strict=False)]
        expected = [batch[0] for batch in one]
        wrong += sum(abs(len(part) - len(expected)) for part in parts)
        wrong += _unlike(joined, expected)
        wrong += not torch.equal(torch.cat(joined).sort().values, torch.arange(_size(loader)))
    return float(wrong)


def _size(loader: DataLoader[Any]) -> int:
    return len(cast("Sized", loader.dataset))


def _unlike(some: Sequence[Tensor], others: Sequence[Tensor]) -> int:
    """Count pairs that are not equal."""
    return sum(not torch.equal(one, other) for one, other in zip(some, others, strict=False))


def check_resuming(state: DistState) -> float:
    """Count batches after a stop in the middle that differ from those of a run without one."""
    sharded = shard_loader(_loader(state), state)
    every = [batch[0] for epoch in sharded.epochs(2) for batch in epoch]
    stopped = replace(state, step=2)
    rest = [batch[0] for epoch in sharded.epochs(2, since=stopped) for batch in epoch]
    return float(_unlike(every[2:], rest) + abs(len(every) - 2 - len(rest)))


def check_loading(state: DistState) -> float:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        inputs = batch[1].to(state.device)
        return F.mse_loss(model(inputs), inputs[:, :1])

    loader = _loader(state)
    expected = train_by_hand(small_model(state), loss_fn, list(shard_loader(loader, _alone(state))))
    model = small_model(state)
    optimizer = sgd(model)
    recipe = compose(place(), wrap_ddp(), accumulate(2))
    running, step = build(state, recipe(Plan(loss_fn, model, optimizer)))
    for batch in shard_loader(loader, state):
        running, _ = step(running, batch)
    return largest(flat(model), expected)


def check_gather(state: DistState) -> float:
    """Gather rows of ranks that hold different numbers of them, one none; count differences."""
    rows = torch.arange(
        state.rank * (state.rank + 1) // 2, (state.rank + 1) * (state.rank + 2) // 2
    )
    if state.rank == 0:
        rows = rows[:0]
    total = state.world_size * (state.world_size + 1) // 2
    found = gather(rows.to(state.device), state).cpu()
    expected = torch.arange(1, total)
    return largest(found, expected) if found.shape == expected.shape else float(total)


def check_reduce(state: DistState) -> float:
    """Reduce integers, a tensor and a mean without rank 0, and broadcast from the last rank; count errors."""
    ranks, last = range(state.world_size), state.world_size - 1
    number = reduce_sum(2**40 + state.rank, state)
    off = float(abs(number - sum(2**40 + rank for rank in ranks)))
    off += largest(reduce_sum(_ones(state) * state.rank, state), _ones(state) * sum(ranks))
    if last:
        mean = reduce_mean(float(state.rank), state, weight=state.rank)
        off += abs(mean - sum(rank * rank for rank in ranks) / sum(ranks))
    word, tensor = broadcast((state.rank, _ones(state) * state.rank), state, source=last)
    return off + abs(word - last) + largest(tensor, _ones(state) * last)


def _ones(state: DistState) -> Tensor:
    return torch.ones(1000, device=state.device)


def check_devices(state: DistState) -> float:
    """Count ranks that share an accelerator; add the error of a sum over the device's own backend."""
    device = state.device
    places = exchange((socket.gethostname(), device.type, device.index), state, "check")
    shared = 0 if device.type == "cpu" else len(places) - len(set(places))
    total = reduce_sum(_ones(state) * (state.rank + 1), state)
    expected = _ones(state) * sum(range(1, state.world_size + 1))
    return shared + largest(total, expected)
