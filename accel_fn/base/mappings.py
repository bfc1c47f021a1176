"""Mappings and dataclasses that torch's pytree does not know, as nodes that it knows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accel_fn.base.samples import Samples
from accel_fn.errors import BatchError


class _Form:
    """A mapping of a class that torch's pytree does not know: keys, and all that a copy of it has."""

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
    """The same as a node of pytree's, which restores the mapping, with other values."""

    values: list[Any]
    form: _Form


def _restored(values: Iterable[Any], form: Any) -> Any:
    """Return a mapping of the same class with other values."""
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
                mapping.update(zip(form.keys, before, strict=True))  # the copy shares its items
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
    """A dataclass that torch's pytree does not know: the names of its fields, and all that a copy has."""

    def __init__(self, instance: Any) -> None:
        self.mapping = instance
        self.keys = [each.name for each in fields(instance)]

    def restored(self, values: Iterable[Any]) -> Any:
        """Return a dataclass with other values, and without a call of its `__post_init__`."""
        made = copy.copy(self.mapping)
        for name, value in zip(self.keys, values, strict=True):
            object.__setattr__(made, name, value)  # it may be frozen
        return made


def node_of(tree: Any) -> Any:
    """Return a mapping, or a dataclass with rows, as a node that pytree knows; anything else as it is."""
    if type(tree) in pytree.SUPPORTED_NODES:
        return tree
    if isinstance(tree, Mapping):
        return _Node([*tree.values()], _Form(tree))
    if is_dataclass(tree) and not isinstance(tree, type | nn.Module):
        form = _FormOfFields(tree)
        values = [getattr(tree, name) for name in form.keys]
        # Others are settings, which go to every part whole.
        if any(map(_has_rows, pytree.tree_leaves([*map(opened, values)], _is_samples))):
            return _Node(values, form)
    return tree


class TensorPlace:
    """Stands for a tensor of `ndim` dimensions in a tree that is sent without it."""

    __slots__ = ()
    ndim: Any


def _has_rows(leaf: Any) -> bool:
    return _is_samples(leaf) or (isinstance(leaf, Tensor | TensorPlace) and leaf.ndim > 0)


def _is_samples(leaf: Any) -> bool:
    return type(leaf) is Samples


def opened(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return a tree in which pytree finds the tensors of every `Mapping`, such as a `BatchEncoding`.

    It finds those of dataclasses, too. What pytree makes of the tree has all of them in their own classes.
    """

    def open_node(leaf: Any) -> Any:
        node = node_of(leaf)
        if node is leaf:
            return leaf
        return replace(node, values=[opened(value, is_leaf) for value in node.values])

    return pytree.tree_map(open_node, tree, is_leaf=is_leaf)
