"""Walk, map, move and count batches: trees of tensors and of lists of samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, SupportsIndex, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accel_fn.core.state import DistState, check_state
from accel_fn.errors import ArgumentTypeError, BatchError, message

T = TypeVar("T")
_device = attrgetter("device")


class Samples(list[T]):
    """A list in which each item is one sample. The function `samples` makes it.

    Slices of the list have this class too, and so do copies by torch's pytree, memory pinning and
    pickling.
    """

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Samples[T]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> T | Samples[T]:
        if isinstance(index, slice):
            return Samples(super().__getitem__(index))
        return super().__getitem__(index)


_COLUMNS = (Tensor, Samples)
pytree.register_pytree_node(
    Samples, lambda items: ([*items], None), lambda items, _: Samples(items)
)


def samples(items: Iterable[T | None]) -> Samples[T]:
    """Mark a list as one item per sample, such as images of several sizes, boxes or graphs.

    A `collate_fn` returns it, as the batch or anywhere in it. All functions then count, cut and
    join the list's items, whatever tensors these hold: `count_samples`, `accumulate`,
    `shard_batch`, `gather`, `evaluate`. A plain list is structure, as in a batch `[inputs,
    targets]`.

    Args:
        items: one item per sample, of any kind and size. Items that are None are dropped, so a data
            set can return None for a sample that it cannot read.

    Returns:
        A list, for models that take one.

    Raises:
        TypeError: `items` is a tensor, a mapping or a string, or cannot be iterated.

    Law: a step on them is the loop by hand, for every world size and number of micro-batches.
    Tests: `tests/laws/law03_samples.py`.

    Cost: a list of references.

    >>> import torch, accel_fn as af
    >>> images = af.samples([torch.zeros(3, 4, 5), None, torch.zeros(3, 6, 5)])
    >>> af.count_samples({"images": images, "labels": torch.tensor([1, 0])})
    2
    """
    if not isinstance(items, Iterable) or isinstance(items, Mapping | str | bytes | Tensor):
        rule, repair = "be a list of one item a sample", "the rows of a tensor are samples already"
        got = type(items).__name__
        tensor = isinstance(items, Tensor)
        raise ArgumentTypeError(message("samples", "items", rule, got, repair if tensor else ""))
    return Samples(item for item in items if item is not None)


class _Form:
    """The form of a `_Node`: a mapping of a class that torch's pytree does not know, and its keys."""

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self.mapping = mapping
        self.keys = [*mapping]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Form) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"{type(self.mapping).__name__}{self.keys}"


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A node for pytree: the values of a mapping or dataclass, and the form that rebuilds it."""

    values: list[Any]
    form: _Form


def _restored(values: Iterable[Any], form: Any) -> Any:
    """Return a copy of a form's mapping or dataclass that holds these values."""
    if isinstance(form, _FormOfFields):
        return form.restored(values)
    mapping: Any = form.mapping
    items = dict(zip(form.keys, values, strict=True))
    made: Any = None
    try:
        if isinstance(mapping, MutableMapping):
            before, made = [*mapping.values()], copy.copy(mapping)
            for key, value in items.items():
                made[key] = value
            if any(now is not then for now, then in zip(mapping.values(), before, strict=True)):
                # The copy shares its items with the original, so the loop above has overwritten the
                # original's. Restore them.
                mapping.update(zip(form.keys, before, strict=True))
                made = None
        else:
            made = type(mapping)(items)
        fits = type(made) is type(mapping) and [*made] == form.keys
        fits = fits and all(made[key] is value for key, value in items.items())
    except Exception as error:
        raise _not_restored(mapping) from error
    if not fits:
        raise _not_restored(mapping)
    return made


def _not_restored(mapping: Any) -> BatchError:
    return BatchError(
        "batch: mappings must be of a class whose copies take other values, got "
        f"{type(mapping).__name__}; register it with torch's pytree, or pass dict(...) of it"
    )


def _with_keys(node: _Node) -> tuple[list[tuple[pytree.KeyEntry, Any]], _Form]:
    keys: list[pytree.KeyEntry] = [pytree.MappingKey(key) for key in node.form.keys]
    return [*zip(keys, node.values, strict=True)], node.form


pytree.register_pytree_node(
    _Node,
    lambda node: (node.values, node.form),
    _restored,
    flatten_with_keys_fn=_with_keys,
)


class _FormOfFields(_Form):
    """The form of a `_Node` for a dataclass that torch's pytree does not know, and its field names."""

    def __init__(self, instance: Any) -> None:
        self.mapping = instance
        self.keys = [each.name for each in fields(instance)]

    def restored(self, values: Iterable[Any]) -> Any:
        """Return a copy of the dataclass with these values, without a call of `__post_init__`."""
        made = copy.copy(self.mapping)
        for name, value in zip(self.keys, values, strict=True):
            # Call `object.__setattr__`, since a frozen dataclass refuses plain assignment.
            object.__setattr__(made, name, value)
        return made


def node_of(tree: Any) -> Any:
    """Wrap a value in a `_Node` if it is a mapping or dataclass that torch's pytree does not know.

    Return all other values unchanged, also a dataclass without rows.
    """
    if type(tree) in pytree.SUPPORTED_NODES:
        return tree
    if isinstance(tree, Mapping):
        return _Node([*tree.values()], _Form(tree))
    if is_dataclass(tree) and not isinstance(tree, type | nn.Module):
        form = _FormOfFields(tree)
        values = [getattr(tree, name) for name in form.keys]
        # A dataclass without rows holds settings. If a batch is cut, every part gets the whole
        # dataclass.
        if any(map(_has_rows, pytree.tree_leaves([*map(opened, values)], _is_samples))):
            return _Node(values, form)
    return tree


class TensorPlace:
    """A placeholder for a tensor of `ndim` dimensions, in a tree sent without its tensors."""

    __slots__ = ()
    ndim: Any


def _has_rows(leaf: Any) -> bool:
    return _is_samples(leaf) or (isinstance(leaf, Tensor | TensorPlace) and leaf.ndim > 0)


def _is_samples(leaf: Any) -> bool:
    return type(leaf) is Samples


def opened(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Wrap the mappings and dataclasses of a tree in nodes, so that pytree finds their tensors.

    A tree that pytree builds from the result has the original classes, such as `BatchEncoding`.
    """

    def open_node(leaf: Any) -> Any:
        node = node_of(leaf)
        if node is leaf:
            return leaf
        return replace(node, values=[opened(value, is_leaf) for value in node.values])

    return pytree.tree_map(open_node, tree, is_leaf=is_leaf)


ATOMS = (str, bytes, int, float, bool, type(None))
_WEIGHT_FN = "give Plan a weight_fn and accumulate a split for such data"


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply `fn` to every tensor of `tree`; keep everything else.

    This function walks tuples, lists and dicts itself, several times faster than torch's pytree,
    which walks all other registered classes. It walks a `Mapping` of any other class too.
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    kind = type(tree)
    if kind is tuple:
        return tuple([map_tensors(fn, child) for child in tree])
    if kind is list:
        return [map_tensors(fn, child) for child in tree]
    if kind is dict:
        return {key: map_tensors(fn, child) for key, child in tree.items()}
    if kind in ATOMS:
        return tree
    return pytree.tree_map_only(Tensor, fn, opened(tree))


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in pytree order."""
    return _leaves(tree, Tensor)


def columns_of(tree: Any) -> list[Tensor | Samples[Any]]:
    """Return the tensors and `Samples` lists of a tree, in pytree order.

    The tensors inside a `Samples` list are left out.
    """
    return _leaves(tree, _COLUMNS)


def _leaves(tree: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    """Return the leaves of a tree that have one of these types, in pytree order."""
    kind = type(tree)
    if kind is tuple or kind is list or kind is dict:
        found: list[Any] = []
        for child in tree.values() if kind is dict else tree:
            found += [child] if isinstance(child, kinds) else _leaves(child, kinds)
        return found
    if isinstance(tree, kinds):
        return [tree]
    if kind in ATOMS:
        return []
    nodes = pytree.tree_leaves(opened(tree), is_leaf=lambda node: isinstance(node, kinds))
    return [node for node in nodes if isinstance(node, kinds)]


def to_device(tree: T, state: DistState) -> T:
    """Move the tensors of a tree to the state's device, as `place` moves a batch.

    Args:
        tree: tensors in tuples, lists, dicts, any `Mapping`, and classes that torch's pytree knows;
            all other values are kept.
        state: this rank's state.

    Returns:
        The same tree; `tree` itself if its tensors are on the device already.

    Cost: a copy of each tensor that is on another device. A copy to an accelerator from pinned
    memory overlaps with its work.

    >>> import torch, accel_fn as af
    >>> af.extend.to_device({"image": torch.zeros(2), "name": "a"}, af.DistState())
    {'image': tensor([0., 0.]), 'name': 'a'}
    """
    check_state("to_device", state)
    return moved(tree, state.device)


def moved(tree: T, device: torch.device) -> T:
    """Move the tensors of a tree; return `tree` itself if all are on the device."""
    if {*map(_device, _leaves(tree, Tensor))} <= {device}:
        return tree
    # Wait for a copy to the host: a program could read a non-blocking copy before it has finished.
    overlap = device.type != "cpu"

    def to(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=overlap)

    return cast("T", map_tensors(to, tree))


def count_samples(batch: Any) -> int:
    """Count the samples of a batch: the leading dimension that all its tensors share.

    For `samples`, it counts the items, not the tensors inside them. It ignores 0-dim tensors and
    non-tensors, and counts no samples in None. This is the default `weight_fn` of a plan: every
    sample weighs the same.

    Args:
        batch: a tree of tensors, each [num_samples, ...], and of `samples`.

    Returns:
        The number of samples, >= 0.

    Raises:
        ValueError: no tensor has a leading dimension, or two tensors have different ones.

    Cost: reads shapes only.

    >>> import torch, accel_fn as af
    >>> af.count_samples({"image": torch.zeros(8, 3, 4, 4), "label": torch.zeros(8)})
    8
    """
    if batch is None:
        return 0
    count = -1
    for column in _leaves(batch, _COLUMNS):
        if isinstance(column, Samples):
            size = len(column)
        elif column.ndim:
            size = column.size(0)
        else:
            continue
        if size != count:
            if count >= 0:
                _refuse_ragged(batch)
            count = size
    if count < 0:
        raise BatchError(
            "count_samples: batch must hold a tensor with a leading dimension, "
            f"got {type(batch).__name__}; register such a class with torch's pytree, mark a list "
            f"of samples by af.samples, or {_WEIGHT_FN}"
        )
    return count


def _refuse_ragged(batch: Any) -> None:
    raise BatchError(
        "count_samples: batch must hold tensors of one leading dimension, "
        f"got shapes {shapes_of(batch)}; mark a list of samples by af.samples, or {_WEIGHT_FN}"
    )


def shapes_of(batch: Any) -> list[tuple[int, ...]]:
    """Return the shapes of tensors with rows; a `Samples` list has the shape (length,)."""
    shapes = [(len(c),) if isinstance(c, Samples) else _shape(c) for c in columns_of(batch)]
    return [shape for shape in shapes if shape]


def _shape(tensor: Tensor) -> tuple[int, ...]:
    # A nested tensor with torch's old layout has no shape, only a number of parts.
    if tensor.is_nested and tensor.layout is torch.strided:
        return (tensor.size(0),)
    return tuple(tensor.shape)


def rows_of(batch: Any) -> int | None:
    """Return the length of a batch's first `Samples` list or tensor with a dimension; 0 without one.

    Return None if the batch is None, or if it holds `Samples` and all of its columns are empty.
    """
    if batch is None:
        return None
    kind = type(batch)
    # Most batches begin with a tensor. Read the length of this tensor first, since listing all
    # tensors is slower.
    if (kind is tuple or kind is dict) and batch:
        first = batch[0] if kind is tuple else next(iter(batch.values()))
        if type(first) is Tensor and first.ndim and first.size(0):
            return first.size(0)
    columns = columns_of(batch)
    if Samples in map(type, columns) and all(0 in shape for shape in shapes_of(batch)):
        return None
    for column in columns:
        if isinstance(column, Samples):
            return len(column)
        if column.ndim:
            return column.size(0)
    return 0
