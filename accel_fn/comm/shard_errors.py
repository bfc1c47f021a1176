"""Errors of programs that take a rank's shard for a whole tensor: torch's own, and those it has none for."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_fn.comm.dtensor import is_sharded
from accel_fn.errors import AccelError, LossError

_WORDS = ("DTensor", "harding", "sharded", "device_mesh", "different meshes", "python storage")
_FOLDERS = ("/torch/distributed/tensor/", "/torch/distributed/_functional_collectives")


def is_of_shards(error: BaseException) -> bool:
    """Was an error raised by torch for an operation on shards?"""
    if any(word in str(error) for word in _WORDS):
        return True
    frames = traceback.extract_tb(error.__traceback__)[-12:]
    names = [each.filename.replace("\\", "/") for each in frames]
    return any(folder in name for name in names for folder in _FOLDERS)


def note_shards(error: Exception, name: str, repair: str) -> None:
    """Add to an error of torch's about shards what was given them, and the repair."""
    if is_of_shards(error) and not isinstance(error, AccelError):
        error.add_note(
            f"step: {name} was given shards (DTensors), of which each rank holds a part, which torch cannot "
            f"compute this of; {repair}"
        )


def place_of_error(error: BaseException, model: nn.Module) -> str:
    """Return the innermost module of a model whose forward an error left, as `<name>, a <class>`."""
    names = {each: name for name, each in model.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, nn.Module) and module in names:
            found = f"{names[module] or 'the model'}, a {type(module).__name__}"
    return found


class WholeNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which no number is read of a sum over shards, of which each rank has its own part.

    torch gives each rank its part: `float(parameter.norm())` is another number on each rank.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and is_sharded(args[0]):
            placements = args[0].placements
            if any(not each.is_replicate() for each in placements):
                raise LossError(
                    "step: a number must not be read of what is computed from shards of a parameter, "
                    f"since each rank has its part ({', '.join(map(str, placements))}); call full_tensor() "
                    "on it first, as in float(weight.norm().full_tensor())"
                )
        return func(*args, **kwargs or {})
