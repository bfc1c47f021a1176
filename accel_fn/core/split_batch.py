"""Cut a batch along its leading dimension; refuse values that may or may not hold rows."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accel_fn.core.batch import ATOMS, Samples, count_samples, node_of, tensors_of
from accel_fn.errors import BatchError

_DEPTH = 3
"""The depth to which objects are searched for tensors. An object without tensors goes to every part
whole."""
_SPLIT = "give accumulate a split"


def part_sizes(num_rows: int, num_parts: int) -> list[int]:
    """Return the sizes of consecutive parts of `num_rows`. They differ by at most one, larger ones first."""
    size, extra = divmod(num_rows, num_parts)
    return [size + 1] * extra + [size] * (num_parts - extra)


def part_bounds(num_rows: int, num_parts: int, index: int) -> tuple[int, int]:
    """Return start and stop of a part of `part_sizes`. Neither decreases if rows are added."""
    size, extra = divmod(num_rows, num_parts)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


def _is_plain(field: object) -> bool:
    return (
        type(field) is Tensor
        and field.ndim > 0
        and field.layout is torch.strided
        and not field.is_nested
    )


def split_rows(tree: Any, sizes: list[int], function: str = "step") -> Sequence[Any]:
    """Cut `tree` into consecutive parts of these sizes; errors name `function`."""
    if len(sizes) == 1:
        return [tree]
    # Most batches are tuples of plain tensors, for which this path is faster.
    if type(tree) is tuple and tree and all(map(_is_plain, tree)):
        return list(zip(*[torch.split_with_sizes(each, sizes) for each in tree], strict=True))
    return _RowSplit(sizes, function).parts_of(tree)


class _RowSplit:
    """Cuts the columns of a batch into parts; gives each value without rows to every part.

    This class refuses ambiguous values. Otherwise it could cut one batch in one way, and the next
    batch, of another length, in another way.
    """

    def __init__(self, sizes: list[int], function: str) -> None:
        self.sizes = sizes
        self.num_rows = sum(sizes)
        self.stops = list(accumulate(sizes))
        self.function = function

    def parts_of(self, tree: Any) -> Sequence[Any]:
        """Cut a tree; the parts have its structure."""
        kind = type(tree)
        if isinstance(tree, Tensor):
            return self._parts_of_tensor(tree)
        if kind in ATOMS:
            return [tree] * len(self.sizes)
        if kind is Samples or ((kind is list or kind is tuple) and self._is_column(tree)):
            return self._slices(tree)
        node = node_of(tree)
        children, structure = pytree.tree_flatten(node, is_leaf=lambda each: each is not node)
        if structure.is_leaf():
            return self._parts_of_object(tree)
        columns = zip(*map(self.parts_of, children), strict=True)
        parts = [pytree.tree_unflatten(column, structure) for column in columns]
        return parts or [tree] * len(self.sizes)

    def _slices(self, rows: Any) -> list[Any]:
        return [rows[stop - size : stop] for size, stop in zip(self.sizes, self.stops, strict=True)]

    def _parts_of_tensor(self, tensor: Tensor) -> Sequence[Tensor]:
        if not tensor.ndim:
            return [tensor] * len(self.sizes)
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            self._refuse("hold dense tensors where it is cut", f"a {kind} one", _SPLIT)
        return self._strided(tensor)

    def _strided(self, tensor: Tensor) -> Sequence[Tensor]:
        return torch.split_with_sizes(tensor, self.sizes)

    def _is_column(self, items: Sequence[Any]) -> bool:
        """Return whether a sequence is a column: one item per sample, and no tensors.

        A tuple is a column only if it holds strings.
        """
        if len(items) < 2 or tensors_of(items):
            return False
        kinds = {*map(type, items)}
        is_text = kinds <= {str, bytes}
        fits = len(items) == self.num_rows
        got = f"{len(items)} items beside {self.num_rows} samples"
        if fits and all(isinstance(each, numbers.Number) for each in items):
            rule = "not hold as many numbers as samples in a list or tuple"
            self._refuse(rule, got, "make numbers of samples a tensor, and settings a dict")
        if type(items) is tuple and not is_text:
            return False
        if fits:
            self._refuse_fields(items, kinds)
        elif is_text or not all(isinstance(each, numbers.Number | list | tuple) for each in items):
            rule = "hold lists, and tuples of strings, of one item a sample"
            self._refuse(rule, got, "keep settings in a dict, or out of the batch")
        return fits

    def _refuse_fields(self, items: Sequence[Any], kinds: set[type]) -> None:
        """Refuse a list of tuples if each tuple may be one sample, or one field of all samples."""
        if kinds == {tuple} and all(
            len(each) == self.num_rows and {*map(type, each)} <= {str, bytes} for each in items
        ):
            got = f"a list of {len(items)} tuples of as many strings for as many samples"
            repair = f"each may be a sample or a field; {_SPLIT}"
            self._refuse("not be ambiguous", got, repair)

    def _parts_of_object(self, leaf: Any) -> Sequence[Any]:
        """Cut a NumPy array; refuse an object that may hold rows; give other objects to each part whole."""
        if isinstance(leaf, nn.Module | type):
            return [leaf] * len(self.sizes)
        num_rows = length_of(leaf)
        if isinstance(leaf, np.ndarray) and leaf.ndim and num_rows == self.num_rows:
            return self._slices(leaf)
        rows = held_rows(leaf)
        if rows or num_rows == self.num_rows or isinstance(leaf, np.ndarray):
            holds = "that holds tensors" if rows else f"of length {num_rows}"
            repair = f"make it a tensor, a dict or a dataclass, or {_SPLIT}"
            rule = "hold rows in tensors, lists, and containers that torch's pytree knows"
            self._refuse(rule, f"a {type(leaf).__name__} {holds}", repair)
        return [leaf] * len(self.sizes)

    def _refuse(self, rule: str, got: str, repair: str) -> NoReturn:
        name = "batch" if self.function == "step" else "tree"
        raise BatchError(f"{self.function}: {name} must {rule}, got {got}; {repair}")


def length_of(leaf: Any) -> int | None:
    """Return the length of an object; None if it has none."""
    try:
        return len(leaf)
    except TypeError:
        return None


def held_rows(leaf: Any) -> list[Tensor]:
    """Find tensors with rows in the attributes and items of an object that is a leaf to pytree."""
    return [each for each in _held_tensors(leaf, _DEPTH) if each.ndim]


def _held_tensors(leaf: Any, depth: int) -> list[Tensor]:
    inside = [*getattr(leaf, "__dict__", {}).values()]
    inside += [getattr(leaf, name, None) for name in getattr(leaf, "__slots__", ())]
    inside += leaf if isinstance(leaf, tuple | list | set | frozenset) else []
    found = tensors_of(inside)
    for each in pytree.tree_leaves(inside) if depth else []:
        if not isinstance(each, (*ATOMS, Tensor, nn.Module, type)):
            found += _held_tensors(each, depth - 1)
    return found


def split_batch(batch: Any, num_parts: int) -> Sequence[Any]:
    """Cut a batch along the leading dimension, into consecutive parts of nearly equal size.

    Parts differ by at most one sample. There are never more parts than samples, and always at least
    one, so no part is empty unless the batch is.

    Args:
        batch: a tree of tensors, each [num_samples, ...], and of lists marked by `af.samples`. Lists of
            num_samples non-tensors, tuples of num_samples strings, and NumPy arrays are cut too. Each
            part has all 0-dim tensors, numbers, strings and other objects without rows.
        num_parts: at most this many parts.

    Returns:
        Views of the batch, no copies.

    Raises:
        ValueError: two tensors have different leading dimensions, or it is unclear whether a value
            holds rows (a list of as many numbers as samples, an object of an unknown class that
            holds tensors).

    Cost: no read of the data.

    >>> import torch
    >>> from accel_fn.core.split_batch import split_batch
    >>> [len(part) for part in split_batch(torch.zeros(10, 3), 4)]
    [3, 3, 2, 2]
    """
    # Do not count the rows if nothing is cut: the batch may have no common leading dimension.
    if num_parts == 1:
        return [batch]
    num_rows = count_samples(batch)
    return split_rows(batch, part_sizes(num_rows, max(1, min(num_parts, num_rows))))


def take_part(batch: Any, index: int, num_parts: int) -> Any:
    """Return part `index` of `num_parts` consecutive parts; the part may be empty."""
    return split_rows(batch, part_sizes(count_samples(batch), num_parts))[index]


def interleaved_parts(batch: Any, num_parts: int) -> Sequence[Any]:
    """Cut a batch into parts, each with every `num_parts`-th sample.

    It refuses the same batches as `split_batch`.
    """
    return _InterleavedSplit(part_sizes(count_samples(batch), num_parts), "step").parts_of(batch)


class _InterleavedSplit(_RowSplit):
    """A split that gives one row to each part in turn, instead of consecutive rows."""

    def _slices(self, rows: Any) -> list[Any]:
        return [rows[first :: len(self.sizes)] for first in range(len(self.sizes))]

    def _strided(self, tensor: Tensor) -> Sequence[Tensor]:
        return self._slices(tensor)
