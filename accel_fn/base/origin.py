"""Where a batch of a loader comes from: the check of a step collates a few of its samples again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accel_fn.base.batch import tensors_of

_NAME = "_accel_fn_origin"


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The samples of a batch, of which a few can be read again, and what makes a batch of them."""

    num_samples: int
    read: Callable[[], list[Any]]
    collate: Callable[[list[Any]], Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a batch that is copied or pickled leaves its data set behind


def mark(batch: Any, origin: Origin) -> None:
    """Note the origin of a batch at its tensors."""
    for tensor in tensors_of(batch):
        setattr(tensor, _NAME, origin)


def carry_mark(moved: Tensor, source: Tensor) -> None:
    """Note the origin of a tensor at a copy on another device."""
    origin = getattr(source, _NAME, None)
    if origin is not None:
        setattr(moved, _NAME, origin)


def origin_of(batch: Any) -> Origin | None:
    """Return the origin of a batch; None if the loop has made or replaced a tensor in it."""
    found = {id(each): each for each in (getattr(t, _NAME, None) for t in tensors_of(batch))}
    return next(iter(found.values())) if len(found) == 1 else None
