"""Measures the cost of a batch before training: torch's DataLoader, accelerate's and accel_fn's."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from accel_fn.data.order import Order
from tests.tools.benchmarks.measuring import Block, Station, Work, time_in_turn
from tests.tools.benchmarks.results import Row, Table, make_row

NUM_SAMPLES, NUM_FEATURES, BATCH_SIZE = 200_000, 16, 64
BATCHES_PER_BLOCK, NUM_SKIPPED, SEEKS_PER_BLOCK = 400, 2000, 100
BOUND_US = 1000.0

Start = Callable[[], Iterator[Any]]


def make_data() -> TensorDataset:
    """Make features and a label, which is the number of the sample."""
    random = torch.Generator().manual_seed(0)
    features = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=random)
    return TensorDataset(features, torch.arange(NUM_SAMPLES))


def accelerated(loader: DataLoader[Any]) -> DataLoader[Any]:
    from accelerate import Accelerator

    prepared: DataLoader[Any] = Accelerator(cpu=True).prepare(loader)
    return prepared


def compare_batches(name: str, station: Station, rounds: int, patience_s: float) -> Table:
    """Time a shuffled epoch, batch by batch."""
    loader = DataLoader(make_data(), batch_size=BATCH_SIZE, shuffle=True)
    starts: dict[str, Start | None] = {"torch": partial(iter, loader), "accelerate": None}
    if find_spec("accelerate"):
        starts["accelerate"] = partial(iter, accelerated(loader))
    starts["accel_fn"] = partial(iter, af.shard_loader(loader, af.DistState()))
    return _compare(name, starts, BATCHES_PER_BLOCK, 0.10, station, rounds, patience_s)


def compare_skipping(name: str, station: Station, rounds: int, patience_s: float) -> Table:
    """Time the first batch of a run that resumes after 2,000 batches."""
    loader = DataLoader(make_data(), batch_size=BATCH_SIZE, shuffle=True)
    starts: dict[str, Start | None] = {
        "torch": lambda: islice(iter(loader), NUM_SKIPPED, None),
        "accelerate": None,
    }
    if find_spec("accelerate"):
        from accelerate import skip_first_batches

        prepared = accelerated(loader)
        starts["accelerate"] = lambda: iter(skip_first_batches(prepared, NUM_SKIPPED))
    ours, since = af.shard_loader(loader, af.DistState()), af.DistState(step=NUM_SKIPPED)
    starts["accel_fn"] = lambda: iter(next(ours.epochs(1, since=since)))
    return _compare(name, starts, 1, 0.10, station, rounds, patience_s)


def compare_seeking(name: str, station: Station, rounds: int, patience_s: float) -> Table:
    """Time the look-up of the samples of one distant batch, against its target."""
    order = Order(BATCH_SIZE, 1, drop_last=False, num_samples=10**12, shuffle=True, seed=0)

    def seek() -> None:
        for batch in range(SEEKS_PER_BLOCK):
            order.indices(10**6, batch * 10**8, 0)

    seek()
    [blocks] = time_in_turn({"accel_fn": seek}, rounds, station, patience_s).values()
    bound_s = SEEKS_PER_BLOCK * BOUND_US / 1e6
    bound = [Block(bound_s, bound_s)] * len(blocks)
    rows = (
        make_row("1 ms", bound, bound, SEEKS_PER_BLOCK, 0.0, None),
        make_row("accel_fn", blocks, bound, SEEKS_PER_BLOCK, 0.0, 1.0),
    )
    return Table(name, rows, disturbed=sum(block.is_disturbed for block in blocks) / len(blocks))


MEASURES = {
    "data, a batch of 64": compare_batches,
    "data, skipping 2,000 batches": compare_skipping,
    "data, a batch of epoch 10**6 of 10**12 indices": compare_seeking,
}


def _compare(
    name: str,
    starts: dict[str, Start | None],
    num_batches: int,
    target: float,
    station: Station,
    rounds: int,
    patience_s: float,
) -> Table:
    """Time the first `num_batches` of every loader, once each has passed its check."""
    missing = {each: _missing(start()) for each, start in starts.items() if start is not None}
    least = next(iter(missing.values()))
    works: dict[str, Work] = {
        each: partial(_take, start, num_batches)
        for each, start in starts.items()
        if start is not None and missing[each] == least
    }
    gc.collect()
    gc.freeze()
    blocks = time_in_turn(works, rounds, station, patience_s)
    first, *_ = blocks.values()
    rows = []
    for each in starts:
        if each in blocks:
            aim = target if each == "accel_fn" else None
            rows.append(make_row(each, blocks[each], first, num_batches, 0.0, aim))
        elif each in missing:
            rows.append(Row(each, f"loses {missing[each] - least} samples", is_faulty=True))
        else:
            rows.append(Row(each, "not installed"))
    every = [block.is_disturbed for of_one in blocks.values() for block in of_one]
    return Table(name, tuple(rows), disturbed=sum(every) / len(every))


def _missing(batches: Iterable[tuple[Tensor, Tensor]]) -> int:
    """Count the samples that never come."""
    labels = torch.cat([labels for _, labels in batches])
    return NUM_SAMPLES - len(labels.unique())


def _take(start: Start, num_batches: int) -> None:
    for _ in islice(start(), num_batches):
        pass
