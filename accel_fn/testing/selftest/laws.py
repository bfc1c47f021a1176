"""The library's promises, each with the check that holds it against plain torch on a real world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from accel_fn.base.state import DistState
from accel_fn.testing.selftest.comm_checks import (
    check_devices,
    check_gather,
    check_loading,
    check_reduce,
    check_resuming,
    check_shards,
)
from accel_fn.testing.selftest.training_checks import (
    check_bf16,
    check_clipping,
    check_fsdp,
    check_microbatches,
    check_overflow,
    check_ranks,
    check_scaling,
    check_schedule,
    check_tokens,
    exact_dtype,
)


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise, the bound for rounding, and the function that checks it."""

    words: str
    bound: float
    check: Callable[[DistState], float]


def promises(state: DistState) -> list[Promise]:
    """List all promises for a world on such devices."""
    rounding = 1e-9 if exact_dtype(state) == torch.float64 else 1e-4
    return [
        Promise("ranks are on devices of their own, and their sums are right", 0, check_devices),
        Promise("W ranks train as one", rounding, check_ranks),
        Promise("shards train as one", rounding, check_fsdp),
        Promise("clipping is by the norm of all ranks", rounding, check_clipping),
        Promise("micro-batches change nothing", rounding, check_microbatches),
        Promise("tokens of all ranks count alike", rounding, check_tokens),
        Promise("a loss scale changes nothing", rounding, check_scaling),
        Promise("a schedule follows the updates that are made", rounding, check_schedule),
        Promise("bf16 trains as one rank's bf16", 2e-2, check_bf16),
        Promise("an fp16 overflow on one rank skips the update on all", 0, check_overflow),
        Promise("shards partition every epoch, in one order", 0, check_shards),
        Promise("a run resumes where it stopped", 0, check_resuming),
        Promise(
            "training through shard_loader is training through the loader", rounding, check_loading
        ),
        Promise("gather gives the order of the data set", 0, check_gather),
        Promise("reduce and broadcast give what one process has", rounding, check_reduce),
    ]
