"""Mappings of classes that torch's pytree does not know, as nodes that it knows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from torch.utils import _pytree as pytree

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


def node_of(tree: Any) -> Any:
    """Return a mapping that pytree does not know as a node that it knows; anything else as it is."""
    if type(tree) not in pytree.SUPPORTED_NODES and isinstance(tree, Mapping):
        return _Node([*tree.values()], _Form(tree))
    return tree


def opened(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return a tree in which pytree finds the tensors of every `Mapping`, such as a `BatchEncoding`.

    What pytree makes of it has all mappings in their own classes.
    """

    def open_node(leaf: Any) -> Any:
        node = node_of(leaf)
        if node is leaf:
            return leaf
        return replace(node, values=[opened(value, is_leaf) for value in node.values])

    return pytree.tree_map(open_node, tree, is_leaf=is_leaf)
