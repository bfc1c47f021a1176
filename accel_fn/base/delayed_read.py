"""Reads values of a device one step late, so that the host does not wait for them."""

from __future__ import annotations

import torch
from torch import Tensor


class DelayedRead:
    """Returns a value on the host: at once from a CPU, else at the next call.

    By then the device has the work of the next step, so the host waits only if it is more than a
    step behind.
    """

    def __init__(self) -> None:
        self._pending: tuple[Tensor, torch.Event] | None = None

    def __call__(self, value: Tensor) -> Tensor | None:
        """Return the newest known value, or None; later writes to `value` are not seen."""
        if value.is_cpu:
            return value
        known = self.last()
        held = torch.empty_like(value, device="cpu", pin_memory=True)
        held.copy_(value, non_blocking=True)
        event = torch.Event(value.device)
        # The default is a stream of the current device, which may be another than the value's.
        event.record(torch.accelerator.current_stream(value.device))
        self._pending = held, event
        return known

    def last(self) -> Tensor | None:
        """Wait for the last value and return it; None if it was returned already."""
        if self._pending is None:
            return None
        value, event = self._pending
        self._pending = None
        event.synchronize()
        return value
