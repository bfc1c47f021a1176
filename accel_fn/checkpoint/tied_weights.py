"""Names that are one tensor of a module, and the layout of a tensor in memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from accel_fn.core.dtensor import is_sharded, local


def split_tied(
    saved: Mapping[str, Tensor], model: nn.Module
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split a `state_dict` into tensors under their first names, and other name -> first name."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    firsts: dict[object, str] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in saved.items():
        # Empty shards of two parameters cannot be distinguished by their memory.
        key = parameters.get(name) if is_sharded(value) else view_key(value)
        first = firsts.setdefault(key, name) if value.numel() else name
        if first == name:
            tensors[name] = value
        else:
            tied[name] = first
    return tensors, tied


def view_key(tensor: Tensor) -> object:
    """Return a key that is equal for two tensors that read the same elements in the same way."""
    tensor = local(tensor)
    strides = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    marks = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), tensor.shape, tuple(strides), *marks


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements share one place in memory by a stride of 0."""
    return any(
        not stride and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
