"""Counts the Python calls and the ATen operations of an update, which no other process disturbs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

from tests.tools.benchmarks.tasks import NUM_BATCHES

Update = Callable[[int], None]
WARM_UP = 130
"""Updates before the count: `skip_spikes` needs 100, and checks look at the first updates."""


class Counts(NamedTuple):
    """Python frames that an update enters, and ATen operations that it dispatches: means of 8 updates."""

    calls: float
    ops: float


def count(update: Update, *, warm_up: int = WARM_UP) -> Counts:
    """Count a steady update; `warm_up` updates run before."""
    for index in range(warm_up):
        update(index % NUM_BATCHES)
    calls = 0

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    # A collection would call back for the garbage of whatever ran before.
    gc.collect()
    gc.disable()
    sys.setprofile(on_event)
    try:
        for index in range(NUM_BATCHES):
            update(index)
    finally:
        sys.setprofile(None)
        gc.enable()
    with _Ops() as mode:
        for index in range(NUM_BATCHES):
            update(index)
    # the update itself is the benchmark's function
    return Counts(calls / NUM_BATCHES - 1, mode.ops / NUM_BATCHES)


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))
