"""Optimizers that hold other parameters to train than to evaluate, as schedule-free ones do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


def has_modes(optimizer: Any) -> bool:
    """Has an optimizer methods `train` and `eval`?"""
    methods = (getattr(optimizer, name, None) for name in ("train", "eval"))
    return all(map(callable, methods))


def in_train_mode(optimizers: Iterable[Any]) -> list[Any]:
    """Select the optimizers that have modes, by methods `train` and `eval`, and are in train mode."""
    return [
        each
        for each in optimizers
        if has_modes(each) and all(group.get("train_mode", True) for group in each.param_groups)
    ]


@contextmanager
def in_eval_mode(optimizers: Iterable[Any]) -> Iterator[None]:
    """Switch those that are in train mode to eval mode, and back at the end.

    There and back rounds parameters once each: one save is the same as the same save of a resumed run.
    """
    training = in_train_mode(optimizers)
    try:
        for each in training:
            each.eval()
        yield
    finally:
        for each in training:
            each.train()
