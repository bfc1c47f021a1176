"""Collate a few samples of a batch again, by the user's collate_fn."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accel_fn.checks.draws import CannotReplayError
from accel_fn.core.given_batches import Origin
from accel_fn.core.restored import exclusive_random, key_random
from accel_fn.core.state import DistState


class Recollated:
    """Collates some samples of a batch again, chosen by their places in the batch.

    A collate_fn may draw random numbers, which differ in each call. A part therefore takes its rows
    of the drawn tensors from the batch of all samples.
    """

    def __init__(self, origin: Origin, state: DistState) -> None:
        self._origin, self._state = origin, state
        self._samples: list[Any] | None = None
        self._whole: list[Any] = []
        self._is_drawn: list[bool] = []

    def __call__(self, places: Sequence[int]) -> Any:
        """Collate the samples at these places of the batch."""
        if self._samples is None:
            self._read(len(places))
        leaves, form = pytree.tree_flatten(self._collated(places, 0))
        if not any(self._is_drawn):
            return pytree.tree_unflatten(leaves, form)
        if len(leaves) != len(self._whole):
            raise CannotReplayError(
                "collate_fn draws random numbers, and gives other batches for fewer samples"
            )
        drawn = zip(leaves, self._whole, self._is_drawn, strict=True)
        return pytree.tree_unflatten(
            [_rows_of(whole, places, own) if is_drawn else own for own, whole, is_drawn in drawn],
            form,
        )

    def _read(self, num: int) -> None:
        with exclusive_random(self._state.device):
            self._samples = self._origin.read()
        if len(self._samples) != num:
            raise CannotReplayError("the data set gives other samples when they are read again")
        first, again = (pytree.tree_leaves(self._collated(range(num), slot)) for slot in (0, 1))
        self._whole = first
        if len(first) == len(again):
            self._is_drawn = [not _equal(*each) for each in zip(first, again, strict=True)]

    def _collated(self, places: Sequence[int], slot: int) -> Any:
        assert self._samples is not None
        # Copy the samples: collate_fn may remove fields from the samples that it gets.
        own = copy.deepcopy([self._samples[each] for each in places])
        with exclusive_random(self._state.device):
            key_random(self._state, slot)
            return self._origin.collate(own)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(((one == other) | (one != one)).all())
    return True


def _rows_of(whole: Any, places: Sequence[int], like: Any) -> Any:
    """Return the rows of a drawn tensor for these samples, cut to the shape of `like`.

    `whole` is the tensor that collate_fn drew for the whole batch.
    """
    if not isinstance(whole, Tensor) or not whole.ndim or not isinstance(like, Tensor):
        raise CannotReplayError("collate_fn draws what is no row of a tensor")
    found = whole[torch.tensor([*places])]
    if found.ndim != like.ndim or any(a < b for a, b in zip(found.shape, like.shape, strict=True)):
        raise CannotReplayError("collate_fn draws tensors of other shapes")
    return found[tuple(slice(size) for size in like.shape)]
