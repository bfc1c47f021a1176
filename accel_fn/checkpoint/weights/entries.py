"""The tensors of a module by name, and which names are one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import torch
from safetensors.torch import save
from torch import Tensor, nn

from accel_fn.checkpoint.tied_weights import is_expanded, split_tied, view_key
from accel_fn.core.dtensor import local
from accel_fn.core.plan import unwrapped
from accel_fn.errors import ArgumentError, ArgumentTypeError, message


@dataclass(frozen=True, slots=True)
class Entries:
    """The tensors of a module, each under its first name, and the other names of tied ones."""

    tensors: Mapping[str, Tensor]
    tied: Mapping[str, str]
    """Another name -> the first name of the same tensor."""
    dtype: torch.dtype | None = None
    """The dtype in which floating-point tensors are written; None: their own."""
    frozen: Mapping[str, str] = field(default_factory=dict)
    """Name of a parameter that is left out -> hash of its bytes."""

    def written_dtype(self, name: str) -> torch.dtype:
        own = self.tensors[name].dtype
        return self.dtype if self.dtype is not None and own.is_floating_point else own

    def num_bytes(self, name: str) -> int:
        return self.tensors[name].numel() * self.written_dtype(name).itemsize

    def names_of(self, first: str) -> list[str]:
        return [first, *(name for name, other in self.tied.items() if other == first)]


def read_entries(function: str, model: nn.Module) -> Entries:
    """Collect the persistent tensors of a module as it was before it was wrapped or compiled."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(message(function, "model", "be a torch.nn.Module", model))
    plain = unwrapped(model)
    saved = plain.state_dict()
    for name, value in saved.items():
        check_dense(function, name, value)
    tensors, tied = split_tied(saved, plain)
    _check_disjoint(function, {name: local(tensor) for name, tensor in tensors.items()})
    return Entries({name: tensor.detach() for name, tensor in tensors.items()}, tied)


def check_dense(function: str, name: str, value: object) -> None:
    """Refuse an entry of a `state_dict` that cannot be written as it is."""
    if name == "__metadata__":  # the name of a safetensors file's own notes
        raise _refusal(function, "not use that name", name, "a tensor")
    if not isinstance(value, Tensor):
        kind = f"a {type(value).__name__}"
        raise _refusal(function, "hold nothing but tensors in state_dict", name, kind)
    if nn.parameter.is_lazy(value):
        raise _refusal(function, "hold values", name, "a parameter without a shape")
    value = local(value)
    if value.layout is not torch.strided or hasattr(value, "__tensor_flatten__"):
        kind = f"a {type(value).__name__} of layout {value.layout}"
        raise _refusal(function, "hold dense tensors", name, kind)
    if value.is_meta:
        raise _refusal(function, "hold values", name, "a tensor on the meta device")


def check_storable(entries: Entries) -> None:
    for name, tensor in entries.tensors.items():
        dtype = entries.written_dtype(name)
        if not _has_code(dtype, is_number=not tensor.ndim):
            rule = "hold tensors of the dtypes that safetensors knows"
            raise _refusal("save_model", rule, name, dtype)


def check_writable(model: nn.Module, entries: Entries) -> None:
    plain = unwrapped(model)
    own = {view_key(tensor) for tensor in [*plain.parameters(), *plain.buffers()]}
    for name, tensor in entries.tensors.items():
        if tensor.numel() and view_key(tensor) not in own:
            rule = "give its own parameters and buffers in state_dict, no copies"
            raise _refusal("load_model", rule, name, "a copy")
        if is_expanded(tensor):
            rule = "hold tensors that can be written, none that was expanded"
            raise _refusal("load_model", rule, name, f"strides {tensor.stride()}")


def _refusal(function: str, rule: str, name: str, found: object) -> ArgumentError:
    return ArgumentError(f"{function}: model must {rule}, got {found} for {name!r}")


@cache
def _has_code(dtype: torch.dtype, *, is_number: bool) -> bool:
    try:
        save({"": torch.empty(() if is_number else 0, dtype=dtype)})
    except Exception:  # the class depends on the version
        return False
    return True


def _check_disjoint(function: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors whose spans of memory overlap: only the whole of a tensor may have two names."""
    spans = sorted(
        (str(each.device), *_span(each), name) for name, each in tensors.items() if each.numel()
    )
    for (device, _, end, name), (other_device, start, _, other) in pairwise(spans):
        if device == other_device and start < end:
            rule = "hold tensors that are one or do not overlap in memory"
            pair = f"{name!r} and {other!r}, which overlap"
            raise ArgumentError(f"{function}: model must {rule}, got {pair}; clone one of them")


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first element and of the end of the last."""
    steps = ((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (1 + sum(steps)) * tensor.itemsize
