"""Rows 11, 13, 14 and 16: lost and doubled samples, and random numbers that are equal on all
ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from tests.field.accelerate import everywhere, fresh, linear, of_all_ranks, rank, row, shared_folder


def _numbers(count: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), **options)


@row(11)
def resumed() -> str:
    """Resume a run that was stopped after three batches of its second epoch."""
    with shared_folder() as folder:
        accelerator, loader = _started()
        list(loader)
        batches = iter(loader)
        seen = [next(batches)[0] for _ in range(3)]
        accelerator.save_state(folder)
        accelerator, loader = _started()
        accelerator.load_state(folder)
        seen += [batch for (batch,) in accelerator.skip_first_batches(loader, 3)]
    given = of_all_ranks(seen)
    repeated, missing = len(given) - len(set(given)), 64 - len(set(given))
    return f"{repeated} of 64 samples repeated, {missing} never seen"


def _started() -> tuple[Accelerator, Any]:
    set_seed(0)
    accelerator = fresh()
    _, loader = accelerator.prepare(linear(), _numbers(64, batch_size=4, shuffle=True))
    return accelerator, loader


class OwnOrder(Sampler[int]):
    """A sampler that draws from the global generator, as a user's own may."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(32).tolist())

    def __len__(self) -> int:
        return 32


@row(13)
def samplers() -> str:
    accelerator = fresh(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    torch.manual_seed(rank())
    loader = accelerator.prepare(_numbers(16, batch_size=4, shuffle=True))
    missing = 16 - len(set(of_all_ranks([batch for (batch,) in loader])))
    accelerator = fresh()
    set_seed(0)
    if accelerator.is_main_process:
        torch.rand(1)
    loader = accelerator.prepare(_numbers(32, batch_size=4, sampler=OwnOrder()))
    given = of_all_ranks([batch for (batch,) in loader])
    return f"{missing} of 16 samples missing; {len(given) - len(set(given))} of 32 doubled"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


@row(14)
def gathered() -> str:
    accelerator = fresh(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    loader = accelerator.prepare(_numbers(9, batch_size=2))
    rest = accelerator.skip_first_batches(loader, 1)
    kept = sum(len(accelerator.gather_for_metrics(batch)) for (batch,) in rest)
    stream = accelerator.prepare(DataLoader(Stream(), batch_size=2))
    streamed = sum(len(accelerator.gather_for_metrics(batch)) for batch in stream)
    return f"{kept} rows for 5 samples after a skip, {streamed} for 9 of a stream"


@row(16)
def seeds() -> str:
    fresh()
    set_seed(0)
    first, second = everywhere(F.dropout(torch.ones(64)).tolist())
    assert first == second
    return "identical dropout masks and augmentation"
