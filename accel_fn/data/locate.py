"""Where a run stands after so many steps, where epochs must be counted to know it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from accel_fn.errors import ArgumentError, message


def locate_by_counting(
    step: int, batches_of: Callable[[int], Iterable[object]], window: int
) -> tuple[int, int]:
    """The epoch and the window in it that come after `step` windows.

    Args:
        step: in windows, over all epochs.
        batches_of: something for every batch of an epoch; taken no further than needed.
        window: batches in one; the last of an epoch may be shorter.

    Returns:
        Epoch and window, each from 0.
    """
    epoch = 0
    while step > 0:
        num_batches = 0
        for num_batches, _ in enumerate(batches_of(epoch), start=1):
            if num_batches > step * window:
                return epoch, step
        if num_batches == 0:
            rule = f"be at most at the end of epoch {epoch}, which is empty"
            raise ArgumentError(message("epochs", "since", rule, f"{step} steps beyond it"))
        step -= -(-num_batches // window)
        epoch += 1
    return epoch, 0
