"""Fill parameters that no file holds, by a user's function, one module at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accel_fn.core.dtensor import fill, local, whole
from accel_fn.core.empty import is_unfilled, named_tensors
from accel_fn.core.plan import unwrapped
from accel_fn.core.restored import exclusive_random, seed_by_name
from accel_fn.errors import ArgumentError

InitFn = Callable[[nn.Module], object]
_Slot = tuple[dict[str, Any], str, Tensor]
"""The parameters or buffers of a module, a name in them, and the tensor under that name."""


def fill_missing(model: nn.Module, names: Collection[str], fn: InitFn) -> Callable[[], None]:
    """Call `fn` for each module that holds parameters of these names; keep only its writes to these.

    During the call, the module has whole parameters. The parameters of inner modules have no
    values: `fn` is called for each inner module too.

    Args:
        model: every rank calls this for the same names.
        names: tensors of the model, each by one of its names.
        fn: fills the parameters of the module that it gets, for example by `reset_parameters`.

    Returns:
        A function that raises the first error of `fn` on this rank. `fill_missing` does not raise
        it, since other ranks may wait for this rank in a gather.

    Cost: the memory of one module's parameters, and a gather of its sharded parameters that have
    values.
    """
    tensors = named_tensors(model)
    missing = {id(tensors[name]): tensors[name] for name in names}
    failures: list[Exception] = []
    for place, module in unwrapped(model).named_modules():
        own = [*_slots_of(module)]
        due = {id(each): each for _, _, each in own if id(each) in missing}
        if any(isinstance(each, nn.Parameter) or is_unfilled(each) for each in due.values()):
            values = {id(each): _whole(each, is_missing=id(each) in due) for _, _, each in own}
            try:
                _fill_one(place, module, due, values, fn)
            except Exception as error:
                # `fn` is the user's, and may raise anything.
                failures.append(error)
            for key in due:
                del missing[key]

    def check() -> None:
        for error in failures:
            raise error

    return check


def _slots_of(module: nn.Module) -> Iterator[_Slot]:
    for held in (module._parameters, module._buffers):
        for name, each in held.items():
            if each is not None:
                yield held, name, each


def _whole(tensor: Tensor, *, is_missing: bool) -> Tensor:
    """Return a whole tensor for `fn` to overwrite: a copy, or NaN (or 0) if no file holds the tensor."""
    is_parameter = isinstance(tensor, nn.Parameter)
    if is_missing and (is_parameter or is_unfilled(tensor)):
        has_nan = tensor.is_floating_point() or tensor.is_complex()
        gap = float("nan") if has_nan else 0
        device = local(tensor).device
        value = torch.full(tuple(tensor.shape), gap, dtype=tensor.dtype, device=device)
    else:
        value = whole(tensor).clone()
    return nn.Parameter(value, tensor.requires_grad) if is_parameter else value


def _fill_one(
    place: str,
    module: nn.Module,
    due: Mapping[int, Tensor],
    values: Mapping[int, Tensor],
    fn: InitFn,
) -> None:
    device = local(next(iter(due.values()))).device
    with _standing_in(module, values), exclusive_random(device), torch.no_grad():
        seed_by_name(place, device)
        try:
            fn(module)
        except Exception as error:
            raise ArgumentError(
                f"load_model: init must fill {place or 'the model'}, a {type(module).__name__}, got "
                f"{type(error).__name__}: {error}"
            ) from error
        # Read the tensors again: `fn` may have assigned new ones.
        found = [getattr(module, name) for _, name, _ in _slots_of(module)]
    slots = [*_slots_of(module)]
    for (_, name, tensor), value in zip(slots, found, strict=True):
        if id(tensor) in due:
            _check_value(f"{place}.{name}".lstrip("."), tensor, value)
    with torch.no_grad():
        for (_, _, tensor), value in zip(slots, found, strict=True):
            if id(tensor) in due:
                fill(tensor.detach(), value.detach())


def _check_value(name: str, tensor: Tensor, value: Tensor) -> None:
    if value.shape != tensor.shape or value.is_meta or bool(torch.isnan(value).any()):
        got = f"shape {list(value.shape)}" if value.shape != tensor.shape else "no value"
        raise ArgumentError(
            f"load_model: init must fill every parameter that no file holds, got {got} for {name}, of shape "
            f"{list(tensor.shape)}; write to it, as in nn.init.zeros_(module.{name.rpartition('.')[2]})"
        )


@contextmanager
def _standing_in(module: nn.Module, values: Mapping[int, Tensor]) -> Iterator[None]:
    """Replace a module's own tensors by `values`, and those of inner modules by meta tensors.

    `fn` may then write to inner modules too: the writes are lost, and the values from files stay.
    """
    slots = [slot for each in module.modules() for slot in _slots_of(each)]
    try:
        for held, name, tensor in slots:
            held[name] = values[id(tensor)] if id(tensor) in values else _without_value(tensor)
        yield
    finally:
        for held, name, tensor in slots:
            held[name] = tensor


def _without_value(tensor: Tensor) -> Tensor:
    value = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(value, tensor.requires_grad) if is_parameter else value
