"""Observers: functions of `after_update` that watch a run and compute nothing of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from accel_fn.base.state import DistState
from accel_fn.step.plan import Plan


class Observer:
    """A function of `after_update` that is no part of the program that `load` compares.

    On every rank, `save`, `load`, `evaluate` and `predict` call its methods once they are done, with the
    seconds in which the loop waited for them.
    """

    traits = frozenset({"observes"})

    def built(self, step: Any) -> None:
        """Note the step that this function is in. To hold the step would keep both from being collected."""

    def before_step(self, state: DistState, batch: Any) -> None:
        """Note the start of a step, or of its gradients and then of its update, which has no batch."""

    def saved(self, state: DistState, seconds: float, folder: Path) -> None:
        """Note a checkpoint."""

    def loaded(self, state: DistState, seconds: float, folder: Path) -> None:
        """Continue at the position of a checkpoint."""

    def evaluated(self, state: DistState, seconds: float) -> None:
        """Note a pass over a loader."""


def observes(function: Any) -> bool:
    """Return whether a slot function takes no part in what a step computes."""
    return "observes" in getattr(function, "traits", ())


def observers(plans: Iterable[Plan]) -> list[Observer]:
    """Return the observers of plans that are built."""
    every: list[Any] = [each for plan in plans for each in plan.after_update]
    return [each for each in every if isinstance(each, Observer)]


@contextmanager
def evaluating(plan: Plan, state: DistState) -> Iterator[None]:
    """Time a pass over a loader for the observers of a plan."""
    began = perf_counter()
    yield
    seconds = perf_counter() - began
    for each in observers([plan]):
        each.evaluated(state, seconds)
