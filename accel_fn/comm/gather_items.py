"""Rows that are no tensor: which lists are one item a sample, and how such items travel."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence, Set
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

Lists = Literal["rows", "columns"]


def is_rows(node: Any, lists: Lists | None) -> bool:
    """Is this node of a tree one item a sample, or does it have to be refused as if it were?"""
    if type(node) is tuple:  # strings are collated into tuples; any other tuple is a record
        return all(isinstance(item, str | bytes) for item in node) or (
            lists != "columns" and _are_dicts_alike(node)
        )
    if type(node) is not list:
        return False
    if lists is None:  # rows are alike, so tensors beside other things are columns
        bare = any(isinstance(item, Tensor) for item in node)
        return not bare or len(set(map(sort_of, node))) == 1
    return lists == "rows" or not any(map(_holds_rows, node))


def _are_dicts_alike(items: tuple[Any, ...]) -> bool:
    """Dicts of tensors with the same keys: in a tuple as easily one a sample as one a column."""
    dicts = all(type(item) is dict for item in items)
    return dicts and len(set(map(sort_of, items))) == 1 and _tensors_in(items)


def _holds_rows(item: Any) -> bool:
    return isinstance(item, Tensor) or not pytree.tree_structure(item).is_leaf()


def _tensors_in(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(tree))


def sort_of(item: Any) -> str:
    """What the rows of one list have in common: it comes from the program, never from the data."""
    if isinstance(item, Tensor):
        return f"tensor of {item.ndim} dimensions and {item.dtype}"
    if isinstance(item, dict):
        return f"{type(item).__name__} of {', '.join(map(str, item))}"
    return type(item).__name__


def may_be_columns(sorts: Set[str], kind: str, holds_tensors: bool) -> bool:
    """Could these be columns as well, from all that ranks know of them?"""
    if not holds_tensors:
        return False
    only = next(iter(sorts))
    return kind == "tuple" or len(sorts) > 1 or only == "list" or only.startswith("tensor ")


def pack(items: Sequence[Any]) -> tuple[bytes, list[Tensor]]:
    """Items as a pickle without their tensors, and the tensors in the order of their places."""
    room = io.BytesIO()
    pickler = _Pickler(room)
    pickler.dump(items)
    return room.getvalue(), pickler.tensors


def unpack(data: bytes, tensors: Sequence[Tensor]) -> Sequence[Any]:
    """The items that `pack` was given, with other tensors in the places of theirs."""
    return _Unpickler(data, tensors).load()  # type: ignore[no-any-return]


class _Pickler(pickle.Pickler):
    def __init__(self, room: io.BytesIO) -> None:
        super().__init__(room, protocol=5)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not Tensor and type(value) is not nn.Parameter:
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        if hasattr(value, "__tensor_flatten__"):  # a wrapper of other tensors
            raise pickle.PicklingError(f"a {type(value).__name__} is no plain tensor")
        return typed, (value.detach().as_subclass(Tensor), type(value), vars(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        return self._tensors[place]


def typed(tensor: Tensor, kind: type[Tensor], attributes: dict[str, Any]) -> Tensor:
    """A plain tensor as the subclass that it was."""
    if kind is Tensor or kind is nn.Parameter:
        return tensor
    found = tensor.as_subclass(kind)
    vars(found).update(attributes)
    return found
