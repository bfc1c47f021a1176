"""Read device values and count updates one step late, so that the host does not wait."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_POLL_S = 0.01


class DelayedRead:
    """Copies a value to the host: returns a CPU value at once, any other value at the next call.

    At the next call, the device has another step queued. So the host waits only if the device is
    more than a step behind.
    """

    def __init__(self) -> None:
        self._pending: tuple[Tensor, torch.Event] | None = None

    def __call__(self, value: Tensor) -> Tensor | None:
        """Return a CPU value itself; otherwise start a copy, and return the previous value, or None."""
        if value.is_cpu:
            return value
        known = self.last()
        held = torch.empty_like(value, device="cpu", pin_memory=True)
        held.copy_(value, non_blocking=True)
        event = torch.Event(value.device)
        # Pass the stream: by default, `record` uses the current device, which may not be the
        # value's device.
        event.record(torch.accelerator.current_stream(value.device))
        self._pending = held, event
        return known

    def last(self, timeout_s: float | None = None) -> Tensor | None:
        """Wait for the pending value and return it; return None if there is none, or after a time-out."""
        if self._pending is None:
            return None
        value, event = self._pending
        self._pending = None
        if timeout_s is None:
            event.synchronize()
            return value
        end = time.monotonic() + timeout_s
        while not event.query():
            if time.monotonic() > end:
                return None
            time.sleep(_POLL_S)
        return value


class DelayedFloats:
    """Converts named values to floats: returns them at once on a CPU, otherwise at the next call."""

    def __init__(self) -> None:
        self._delayed = DelayedRead()
        self._values: dict[str, Any] = {}
        self._copied: list[str] = []

    def __call__(self, values: Mapping[str, Any], device: torch.device) -> dict[str, float] | None:
        """Return the newest known values, or None; the tensors among `values` have one element."""
        if device.type == "cpu":
            return {name: float(each) for name, each in values.items()}
        known = self.last()
        copied = {
            name: each
            for name, each in values.items()
            if isinstance(each, Tensor) and each.device == device
        }
        # Convert host values now: the caller may change them in place before they are read.
        self._values = {
            name: each if name in copied else float(each) for name, each in values.items()
        }
        self._copied = [*copied]
        self._delayed(torch.stack([*copied.values()]))
        return known

    def last(self, timeout_s: float | None = None) -> dict[str, float] | None:
        """Wait for the pending values and return them, as `DelayedRead.last` does."""
        known = self._delayed.last(timeout_s)
        if known is None:
            return None
        return {**self._values, **dict(zip(self._copied, known.tolist(), strict=True))}


class UpdateCount:
    """Counts applied updates. If only the device knows whether one was applied, the count is a step late."""

    def __init__(self, *, always: bool) -> None:
        self._always = always
        """Whether every update is applied."""
        self._delayed = DelayedRead()
        self.value = 0
        """Number of applied updates, as far as the host has read it."""

    def add(self, applied: Tensor) -> bool | None:
        """Count an update; return whether it was applied, or None if that is not known yet."""
        self.read()
        known = applied if self._always else self._delayed(applied)
        if known is not applied:
            return None
        made = self._always or bool(applied)
        self.value += made
        return made

    def read(self) -> int:
        """Wait for the newest update; return the number of applied updates."""
        known = self._delayed.last()
        self.value += 0 if known is None else int(known)
        return self.value

    def restore(self, value: int) -> None:
        """Continue from the count in a checkpoint; drop a pending update of the earlier run."""
        self._delayed.last()
        self.value = value
