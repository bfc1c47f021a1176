"""The part of a rank that has no sample of a batch: a batch of no rows, in the form of the others."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accel_fn.core.batch import ATOMS, Samples, node_of
from accel_fn.core.split_batch import held_rows, length_of


class EmptyPart(list[Any]):
    """The samples of a rank that has none: one sample of the batch, whose form its rows would have."""


def without_rows(one: Any, two: Any) -> Any:
    """Return the batch of no samples, by those of a sample and of twice this sample.

    What is twice as long in the second has rows, which are cut off. None if anything else would have
    to be cut, such as tokens of all samples in one row.
    """
    cut = _Cut()
    try:
        found = cut.without(one, two)
    except (_UncutError, TypeError, ValueError):  # trees of two forms differ in length or in kind
        return None
    return found if cut.has_rows else None


def twice(samples: list[Any]) -> list[Any]:
    """Repeat samples, as copies: a collate_fn may take fields out of its samples."""
    return [copy.copy(each) for each in samples * 2]


class _UncutError(Exception):
    """Raised if a part of a batch may hold rows, and is not twice as long for two samples."""


class _Cut:
    """The cut of all rows off a batch."""

    def __init__(self) -> None:
        self.has_rows = False

    def without(self, one: Any, two: Any) -> Any:
        """Return a tree without its rows."""
        kind = type(one)
        if kind in ATOMS:
            return one
        if isinstance(one, Tensor | np.ndarray):
            if not one.ndim:
                return one
            if isinstance(one, Tensor) and (one.layout is not torch.strided or one.is_nested):
                raise _UncutError
            return self._rowless(one, two)
        if kind is Samples or (kind in (list, tuple) and len(one) != len(two)):
            return self._rowless(one, two)
        node = node_of(one)
        parts, structure = pytree.tree_flatten(node, is_leaf=lambda each: each is not node)
        if structure.is_leaf():
            if held_rows(one) or length_of(one) != length_of(two):
                raise _UncutError
            return one
        node = node_of(two)
        others, _ = pytree.tree_flatten(node, is_leaf=lambda each: each is not node)
        found = [self.without(*pair) for pair in zip(parts, others, strict=True)]
        return pytree.tree_unflatten(found, structure)

    def _rowless(self, one: Any, two: Any) -> Any:
        if len(two) != 2 * len(one):
            raise _UncutError
        self.has_rows = True
        return one[:0]
