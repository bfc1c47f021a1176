"""The tensors of a module by name, and which names are one tensor."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from accel_fn.base.unwrap import unwrapped
from accel_fn.comm.dtensor import is_sharded, local
from accel_fn.errors import ArgumentError, ArgumentTypeError, ExtraError, message


@dataclass(frozen=True, slots=True)
class Entries:
    """What a module saves: tensors, each under the first of its names, and the other names."""

    tensors: Mapping[str, Tensor]
    tied: Mapping[str, str]
    """Another name -> the first name of the same tensor."""

    def names_of(self, first: str) -> list[str]:
        """All names of one tensor, the first one first."""
        return [first, *(name for name, other in self.tied.items() if other == first)]


def extra(function: str, module: str) -> Any:
    """A module of safetensors, which is an extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ExtraError(
            f'{function}: {error.name} must be installed; pip install "accel-fn[checkpoint]"',
            name=error.name,
        ) from None


def read_entries(function: str, model: nn.Module) -> Entries:
    """The persistent tensors of a module as it was before it was wrapped or compiled."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(message(function, "model", "be a torch.nn.Module", model))
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    firsts: dict[object, str] = {}
    plain = unwrapped(model)
    saved = plain.state_dict()
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    for name, value in saved.items():
        check_dense(function, name, value)
        # A rank may hold nothing of two tensors in shards.
        mark = parameters.get(name) if is_sharded(value) else _view(value)
        first = firsts.setdefault(mark, name) if value.numel() else name
        if first == name:
            tensors[name] = value.detach()
        else:
            tied[name] = first
    _check_apart(function, {name: local(tensor) for name, tensor in tensors.items()})
    return Entries(tensors, tied)


def check_dense(function: str, name: str, value: object) -> None:
    """Is this of a `state_dict` a tensor that can be written as it is?"""
    if name == "__metadata__":  # what a safetensors file calls its own notes
        raise ArgumentError(_broken(function, "not use that name", name, "a tensor"))
    if not isinstance(value, Tensor):
        what = f"a {type(value).__name__}"
        raise ArgumentError(_broken(function, "hold nothing but tensors in state_dict", name, what))
    if nn.parameter.is_lazy(value):
        raise ArgumentError(_broken(function, "hold values", name, "a parameter without a shape"))
    value = local(value)
    if value.layout is not torch.strided or hasattr(value, "__tensor_flatten__"):
        what = f"a {type(value).__name__} of layout {value.layout}"
        raise ArgumentError(_broken(function, "hold dense tensors", name, what))
    if value.is_meta:
        raise ArgumentError(_broken(function, "hold values", name, "a tensor on the meta device"))


def check_storable(entries: Entries) -> None:
    """Can every tensor be written to a safetensors file?"""
    for name, tensor in entries.tensors.items():
        if not _has_code(tensor.dtype, is_number=not tensor.ndim):
            rule = "hold tensors of the dtypes that safetensors knows"
            raise ArgumentError(_broken("save_model", rule, name, tensor.dtype))


def check_writable(model: nn.Module, entries: Entries) -> None:
    """Does every entry write through to the module?"""
    plain = unwrapped(model)
    own = {_view(tensor) for tensor in [*plain.parameters(), *plain.buffers()] if tensor.numel()}
    for name, tensor in entries.tensors.items():
        if tensor.numel() and _view(tensor) not in own:
            rule = "give its own parameters and buffers in state_dict, no copies"
            raise ArgumentError(_broken("load_model", rule, name, "a copy"))
        if any(
            not step and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            rule = "hold tensors that can be written, none that was expanded"
            raise ArgumentError(_broken("load_model", rule, name, f"strides {tensor.stride()}"))


def _broken(function: str, rule: str, name: str, what: object) -> str:
    return f"{function}: model must {rule}, got {what} for {name!r}"


@cache
def _has_code(dtype: torch.dtype, *, is_number: bool) -> bool:
    probe = torch.empty(() if is_number else 0, dtype=dtype)
    try:
        extra("save_model", "safetensors.torch").save({"": probe})
    except ModuleNotFoundError:
        raise
    except Exception:  # which one depends on the version
        return False
    return True


def _view(tensor: Tensor) -> object:
    """Equal for two tensors that are one: same elements, read in the same way."""
    tensor = local(tensor)
    strides = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    marks = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), tensor.shape, tuple(strides), *marks


def _check_apart(function: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse two tensors with an element in common."""
    storages: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            key = (tensor.device, tensor.untyped_storage().data_ptr())
            storages.setdefault(key, []).append(name)
    for names in storages.values():
        if len(names) > 1 and _ranges_meet(tensors[name] for name in names):
            _check_elements_apart(function, {name: tensors[name] for name in names})


def _ranges_meet(tensors: Iterable[Tensor]) -> bool:
    ranges = sorted((tensor.data_ptr(), tensor.data_ptr() + _extent(tensor)) for tensor in tensors)
    return any(end > start for (_, end), (start, _) in pairwise(ranges))


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    steps = ((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + sum(steps)) * tensor.itemsize


def _check_elements_apart(function: str, tensors: Mapping[str, Tensor]) -> None:
    """Columns of one matrix lie between each other, and are apart: every element gets an owner."""
    unit = min(tensor.itemsize for tensor in tensors.values())
    some = next(iter(tensors.values()))
    owners = torch.full((some.untyped_storage().nbytes() // unit,), -1)
    names = list(tensors)
    for place, (name, tensor) in enumerate(tensors.items()):
        width = tensor.itemsize // unit
        mine = owners.as_strided(
            (*tensor.shape, width),
            (*(step * width for step in tensor.stride()), 1),
            tensor.storage_offset() * width,
        )
        before = int(mine.max())
        if before >= 0:
            rule = "hold tensors that are one or have no element in common"
            what = f"{names[before]!r} and {name!r}, which share some of their memory"
            raise ArgumentError(f"{function}: model must {rule}, got {what}; clone one of them")
        mine.fill_(place)
