"""Items of lists as messages: a pickle without their tensors, and the tensors as bytes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


def pack(items: Sequence[Any]) -> tuple[bytes, list[Tensor]]:
    """Pickle items without their tensors; return the tensors too, in the order of their places."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(items)
    return file.getvalue(), pickler.tensors


def unpack(data: bytes, tensors: Sequence[Tensor]) -> Sequence[Any]:
    """Restore the items that `pack` was given, with other tensors in the places of theirs."""
    return _Unpickler(data, tensors).load()  # type: ignore[no-any-return]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
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
    """Return a plain tensor as the subclass that it was."""
    if kind is Tensor or kind is nn.Parameter:
        return tensor
    found = tensor.as_subclass(kind)
    vars(found).update(attributes)
    return found
