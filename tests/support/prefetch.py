"""Data for the tests of prefetch, and its threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from accel_fn.testing.internals import prefetch_threads

HERE = af.DistState()
TWO_WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}
readers = prefetch_threads


def eventually(condition: Callable[[], bool]) -> bool:
    """Return whether the condition becomes true within some time."""
    stop = time.monotonic() + 100
    while not condition() and time.monotonic() < stop:
        time.sleep(0.001)
    return condition()


class Counted:
    """Yields numbers, and counts how many were taken."""

    def __init__(self, size: int) -> None:
        self.size, self.num_read = size, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.size):
            self.num_read += 1
            yield number


def of(
    num_samples: int, batch_size: int = 2, state: af.DistState = HERE, **options: Any
) -> af.ShardedLoader:
    """Make a loader over the numbers from 0."""
    data = TensorDataset(torch.arange(num_samples))
    return af.shard_loader(DataLoader(data, batch_size=batch_size, **options), state)


def ids(loader: Any) -> list[list[int]]:
    """Return the batches of a loader, as lists of numbers."""
    return [batch[0].tolist() for batch in loader]
