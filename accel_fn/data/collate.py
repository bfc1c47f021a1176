"""Call a user's collate_fn, also for a rank without samples, and refuse ambiguous batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from accel_fn.core.batch import ATOMS, Samples, columns_of, node_of, shapes_of, tensors_of
from accel_fn.core.split_batch import held_rows, length_of
from accel_fn.data.random_generators import Generators
from accel_fn.data.shard_batch import rows_of_rank
from accel_fn.errors import BatchError

# The largest number of tensors that an error message lists.
_SHOWN = 3
Place = tuple[int, ...]
"""The place of a value in a nested batch: its index at each level, the outermost first."""


class Collate:
    """Calls a collate_fn, and refuses an unmarked list of samples: a step would cut each sample."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn
        self._fields: set[Place] = set()
        """The places of lists that an earlier batch has shown to hold fields, and not samples."""

    def __call__(self, samples: Any, count: int | None = None) -> Any:
        """Return the batch of a rank's samples; `count` is their number, by default `len(samples)`."""
        if isinstance(samples, EmptyPart):
            return self.empty([*samples], twice(samples))
        batch = self._collate_fn(samples)
        self._check(batch, samples, len(samples) if count is None else count)
        return batch

    def empty(self, one: Any, two: Any) -> Any:
        """Return the batch of `one` without its rows, or None if rows cannot be cut.

        `one` is a list of one sample; `two` holds that sample twice.
        """
        return self.without_rows(self._collate_fn(one), two)

    def without_rows(self, batch: Any, two: Any) -> Any:
        """Cut the rows off the batch of one sample; `two` is a list of that sample twice."""
        return without_rows(batch, self._twice(two))

    def _twice(self, samples: Any) -> Any:
        """Collate repeated samples, for a comparison of lengths; return None if the collate_fn raises."""
        try:
            # This call is extra, so restore the user's random generators after it.
            with Generators(0):
                return self._collate_fn(samples)
        except Exception:
            # The collate_fn may not accept a sample twice, for example if it removes fields from
            # the samples.
            return None

    def _check(self, batch: Any, samples: Any, count: int) -> None:
        for place, items in _lists(batch):
            if _may_be_samples(items, count) and place not in self._fields:
                if self._grows(place, samples, count):
                    _refuse(items, count)
                self._fields.add(place)

    def _grows(self, place: Place, samples: Any, count: int) -> bool:
        """Return whether the list at `place` is longer for twice as many samples.

        Without this check, `(inputs, labels)` of two packed samples would count as a list of two
        samples.
        """
        # Samples that a data set reads in one call may be of any type, and only a list can be
        # doubled.
        if not isinstance(samples, list):
            return True
        doubled = self._twice([*samples, *samples])
        return doubled is None or len(dict(_lists(doubled)).get(place, ())) == 2 * count


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """Calls a collate_fn with an item of the data set that is a batch already; takes this rank's rows."""

    collate_fn: Callable[[Any], Any]
    rank: int
    world_size: int

    def __call__(self, items: list[Any]) -> Any:
        """Collate the only item, and return this rank's rows of it."""
        repair = "give the DataLoader a batch_size if the data set gives samples"
        batch = self.collate_fn(items[0])
        return rows_of_rank(
            batch, self.rank, self.world_size, "shard_loader", "a ready batch", repair
        )


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """Collates all samples of a batch, and takes this rank's rows."""

    collate: Collate
    rank: int
    world_size: int

    def __call__(self, samples: Any, count: int | None = None) -> Any:
        """Return this rank's rows of the batch of these samples."""
        # In a batch of one sample, a list of one text may be a column or a field. Only a batch of
        # two samples shows which.
        is_one = self.rank > 0 and isinstance(samples, list) and len(samples) == 1
        two = twice(samples) if is_one else None
        batch = self.collate(samples, count)
        if two is not None and {shape[0] for shape in shapes_of(batch)} == {1}:
            return self.collate.without_rows(batch, two)
        name, repair = "what collate_fn returns", 'use collate="rank" where rows are no samples'
        return rows_of_rank(batch, self.rank, self.world_size, "shard_loader", name, repair)


def stacks_plainly(collate_fn: Callable[[Any], Any]) -> bool:
    """Return whether the collate_fn is torch's default, and nobody has registered other types with it."""
    return collate_fn is default_collate and all(
        fn.__module__ == default_collate.__module__ for fn in default_collate_fn_map.values()
    )


def _lists(tree: Any, place: Place = ()) -> Iterator[tuple[Place, list[Any] | tuple[Any, ...]]]:
    """Yield every list and plain tuple of a batch with its place; the items of a named tuple are fields."""
    kind = type(tree)
    if isinstance(tree, Tensor | Samples) or kind in ATOMS:
        return
    children: Any
    if kind is list or kind is tuple:
        yield place, tree
        children = tree
    else:
        node = node_of(tree)
        children, structure = pytree.tree_flatten(node, is_leaf=lambda each: each is not node)
        if structure.is_leaf():
            return
    for number, child in enumerate(children):
        if type(child) not in ATOMS:
            yield from _lists(child, (*place, number))


def _may_be_samples(items: list[Any] | tuple[Any, ...], count: int) -> bool:
    """Return whether items may be samples: one per sample, with tensors that a step would cut."""
    if len(items) != count:
        return False
    columns: list[Any] = []
    for item in items:
        held = columns_of(item)
        if not held and item is not None:
            return False
        columns += held
    sizes = {column.size(0) for column in columns if isinstance(column, Tensor) and column.ndim}
    is_marked = any(isinstance(column, Samples) for column in columns)
    return bool(columns) and sizes != {count} and not is_marked


def _refuse(items: list[Any] | tuple[Any, ...], count: int) -> NoReturn:
    shapes = [list(tensor.shape) for tensor in tensors_of(items)]
    more = ", ..." if len(shapes) > _SHOWN else ""
    raise BatchError(
        f"shard_loader: collate_fn must mark a list of samples, got a {type(items).__name__} of "
        f"{count} items for {count} samples, with tensors of shapes "
        f"{', '.join(map(str, shapes[:_SHOWN]))}{more}; return af.samples([...]) from collate_fn, "
        "or a dict if the items are fields"
    )


class EmptyPart(list[Any]):
    """The part of a rank without samples. It holds one sample, from which an empty batch is made."""


def without_rows(one: Any, two: Any) -> Any:
    """Return an empty batch, made from a batch of one sample and a batch of that sample twice.

    Values that are twice as long in `two` have rows, which are cut off. The result is None if no
    value has rows, or if another value would have to be cut, such as the tokens of all samples in
    one row.
    """
    cut = _Cut()
    try:
        found = cut.without(one, two)
    except (_UncutError, TypeError, ValueError):
        # The rows of a value cannot be cut off, or the two batches are trees of different forms.
        return None
    return found if cut.has_rows else None


def twice(samples: list[Any]) -> list[Any]:
    """Repeat samples, as copies: a collate_fn may remove fields from its samples."""
    return [copy.copy(each) for each in samples * 2]


class _UncutError(Exception):
    """Raised for a value that may hold rows, but is not twice as long for two samples."""


class _Cut:
    """Cuts all rows off a batch, and records whether the batch had any."""

    def __init__(self) -> None:
        self.has_rows = False

    def without(self, one: Any, two: Any) -> Any:
        """Return the tree `one` without its rows; `two` is the tree of twice the samples."""
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
