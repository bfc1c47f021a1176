"""Measure a run between two lines of its log: the loop's waits, the throughput, the peak memory."""

from __future__ import annotations

import math
import resource
import sys
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch

from accel_fn.core.batch import count_samples
from accel_fn.core.plan import Plan
from accel_fn.core.report import Report
from accel_fn.core.state import DistState
from accel_fn.errors import BatchError

_MEMORY_S = 1.0
"""Seconds for which a reading of the peak memory is reused, since reading it is slow."""


class LoopWait:
    """Measures the loop's time between steps, since the last line."""

    def __init__(self) -> None:
        self._last = self._ended = self._waited = self._paused = 0.0
        self._in_step = False
        self.is_new = True
        """Whether no step has begun yet."""

    def begin_step(self) -> None:
        # If a step has begun already, an earlier call has computed the gradients for the update of
        # this call.
        if self._in_step:
            return
        now = perf_counter()
        if self.is_new:
            self.is_new, self._last = False, now
        else:
            self._waited += max(now - self._ended - self._paused, 0.0)
        self._paused, self._in_step = 0.0, True

    def end_step(self) -> None:
        self._ended, self._in_step = perf_counter(), False

    def pause(self, seconds: float) -> None:
        """Exclude time that was spent on a checkpoint or an evaluation."""
        self._paused += seconds

    def since_last(self) -> tuple[float, float]:
        """Return the seconds since the last call, and how many of these were between steps."""
        now = perf_counter()
        elapsed, waited = now - self._last, self._waited
        self._last, self._waited = now, 0.0
        return elapsed, waited


class Throughput:
    """Counts samples and items since the last line."""

    def __init__(self, state: DistState, plan: Plan) -> None:
        self._num_parts = state.data.world_size
        self._is_weight = plan.weight_fn is count_samples
        """Whether the weight of a batch is its number of samples."""
        self._counts = not self._is_weight
        self._takes_windows = bool(plan.having("takes_windows"))
        self._samples = 0
        self._items: dict[str, float] = {}

    def count(self, batch: Any) -> None:
        """Count the samples of this rank's batch, unless the weight of a batch is this count."""
        if self._counts and batch is not None:
            try:
                batches = batch if self._takes_windows else [batch]
                self._samples += sum(map(count_samples, batches))
            except BatchError:
                # `count_samples` cannot count such a batch, only the plan's weight_fn can.
                self._counts = False

    def add(self, report: Report) -> None:
        """Add the weight of a global batch to the counts."""
        if isinstance(report.weight, int | float):
            # Test for numbers, which is faster than a test for a Mapping.
            weights = {"": report.weight}
        else:
            weights = {f"/{name}": weight for name, weight in report.weight.items()}
        for name, weight in weights.items():
            self._items[name] = self._items.get(name, 0.0) + float(weight)

    def per_second(self, seconds: float) -> dict[str, float]:
        """Return samples and items per second, and reset the counts."""
        found = {}
        if self._is_weight:
            found["samples_per_second"] = self._items[""] / seconds
        else:
            if self._counts:
                found["samples_per_second"] = self._samples * self._num_parts / seconds
            for name, items in self._items.items():
                found[f"items_per_second{name}"] = items / seconds
        self._samples, self._items = 0, {}
        return found


class Memory:
    """The peak memory in bytes: of the device, or of the process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read_at = -math.inf
        self._known: dict[str, int] = {}

    def peak(self) -> dict[str, int]:
        """Return the peak, read at most a second ago: reading the memory costs as much as writing a line."""
        now = perf_counter()
        if now - self._read_at > _MEMORY_S:
            self._read_at = now
            if self._device.type == "cpu":
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                self._known = {"peak_memory": peak if sys.platform == "darwin" else peak * 1024}
            else:
                with suppress(RuntimeError):
                    # Some devices do not count their memory.
                    peak = torch.accelerator.max_memory_allocated(self._device)
                    self._known = {"peak_memory": peak}
        return self._known
