"""What a device has computed, read by the host one step late, so that nothing waits for it."""

from __future__ import annotations

import torch
from torch import Tensor


class DelayedRead:
    """Hands back on the host what it was given: at once from a CPU, else at the next call.

    By then the device has long been given the next step, so the host waits only for one
    that is more than a step behind.
    """

    def __init__(self) -> None:
        self._under_way: tuple[Tensor, torch.Event] | None = None

    def __call__(self, value: Tensor) -> Tensor | None:
        """The newest value that is known; None where there is none yet. Later writes are not seen."""
        if value.is_cpu:
            return value
        known = self.last()
        held = torch.empty_like(value, device="cpu", pin_memory=True)
        held.copy_(value, non_blocking=True)
        event = torch.Event(value.device)
        event.record()
        self._under_way = held, event
        return known

    def last(self) -> Tensor | None:
        """What was given last, waited for; None where that was handed back already."""
        if self._under_way is None:
            return None
        value, event = self._under_way
        self._under_way = None
        event.synchronize()
        return value
