"""Warn if the training loop steps a scheduler itself: `schedule` would advance it twice, or undo it."""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakValueDictionary

from torch.optim.lr_scheduler import LRScheduler

from accel_fn.core.warn import warn_user

LOOKS = (1, 2, 10, 100)
"""The advances, by number, after which learning rates are recorded. The next advance compares
the rates."""
_CHECKS: WeakValueDictionary[int, RivalCheck] = WeakValueDictionary()
"""The check of each scheduler, by the scheduler's id, since several steps may advance one
scheduler. A check keeps its scheduler alive, so no other object gets this id."""


def rival_check(scheduler: Any, *, is_main: bool) -> RivalCheck:
    """Return the check of a scheduler."""
    return _CHECKS.setdefault(id(scheduler), RivalCheck(scheduler, is_main=is_main))


class RivalCheck:
    """Warns once if the training loop also steps a scheduler of the optimizer."""

    def __init__(self, scheduler: Any, *, is_main: bool) -> None:
        self._scheduler = scheduler
        self._is_on = is_main
        self._left: tuple[Any, list[float]] = None, []
        """The scheduler's position and learning rates after an advance."""
        self.num_advances = 0
        self.is_due = False
        """Whether the next advance checks if the loop has stepped a scheduler."""

    def begin(self) -> None:
        """Record the scheduler's position and the learning rates after an advance."""
        self.is_due = self._is_on
        if self.is_due:
            self._left = self._position(), self._rates()

    def look(self) -> None:
        """Compare position and rates with the recorded ones, before the next advance."""
        self.is_due = False
        position, rates = self._left
        name = type(self._scheduler).__name__
        if self._position() == position:
            if self._rates() == rates:
                return
            # Accept a rate that the loop has set by hand: some schedules build on this rate.
            rivals = self._rivals()
            if not rivals:
                return
            name = type(rivals[0]).__name__
        self._is_on = False
        warn_user(
            f"step: schedule should be all that steps a scheduler of its optimizer, got a {name} that the "
            "loop steps too; leave scheduler.step() out of the loop, or leave out schedule"
        )

    def _position(self) -> Any:
        return getattr(self._scheduler, "last_epoch", None)

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._scheduler.optimizer.param_groups]

    def _rivals(self) -> list[Any]:
        """Search all objects of this process for other schedulers with the current rates.

        torch keeps no list of the schedulers of an optimizer.
        """
        optimizer, rates = self._scheduler.optimizer, self._rates()
        found: list[Any] = [
            each for each in gc.get_objects() if issubclass(type(each), LRScheduler)
        ]
        return [
            each
            for each in found
            if getattr(each, "optimizer", None) is optimizer
            and id(each) not in _CHECKS
            and [float(rate) for rate in getattr(each, "_last_lr", ())] == rates
        ]
