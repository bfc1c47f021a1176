"""Find the values that a forward writes to its model, by name, and restore the earlier values."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from accel_fn.checks.draws import CannotReplayError
from accel_fn.core.dtensor import local
from accel_fn.core.state import DistState
from accel_fn.errors import StateError

_STATISTICS = (nn.modules.batchnorm._NormBase,)
"""Layers whose running statistics have their own check."""
_MOST_ENTRIES = 1000
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_EXACT = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-4, torch.complex64: 1e-4}
_ROUNDING = 2e-2
"""The relative tolerance, in half precision, of values that are summed in a different order.
`_EXACT` is the tolerance of other dtypes."""


class _Unknown:
    """A placeholder for a value that is not compared."""


class Written(NamedTuple):
    """A value that a forward wrote."""

    kind: str
    """"parameter", "buffer" (a persistent one), or "attribute"."""
    value: Any


class Snapshot:
    """A copy of a model, its gradients and the random generators at one time.

    If a strategy writes to parameters, or to tensors and containers among the attributes, the
    snapshot leaves these out.

    Buffers are copied at once. Parameters and tensors among the attributes are copied only before
    an operation writes to them: call `before_write` first.
    """

    def __init__(
        self, model: nn.Module, state: DistState, *, parameters: bool, attributes: bool
    ) -> None:
        # Do not hold the lock of `exclusive_random` for the life of a snapshot. Simulated ranks
        # would deadlock: one would wait in a collective while the others wait for its lock.
        self._random = _Random(state.device)
        self._model, self._looks_at_attributes = model, attributes
        self._modules = list(model.named_modules())
        self._dicts = [
            (found, dict(found))
            for _, module in self._modules
            for found in (vars(module), module._parameters, module._buffers, module._modules)
        ]
        self._sets = [
            (each._non_persistent_buffers_set, set(each._non_persistent_buffers_set))
            for _, each in self._modules
        ]
        self._buffers = {id(each): (each, each.detach().clone()) for each in model.buffers()}
        self._grads = [(each, each.grad) for each in model.parameters()]
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors that were written to, with copies of their earlier values."""
        self._owners: dict[int, list[Tensor]] = {}
        """A map from a storage to the parameters and attribute tensors that share it."""
        self._versions: list[tuple[Tensor, int]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._before: dict[tuple[str, str], Any] = {}
        for parameter in model.parameters() if parameters else ():
            # With `parameters=False`, do not record parameters, since a strategy writes to them.
            self._own(parameter)
        for name, module in self._modules if attributes else ():
            for key, value in _attributes(module):
                self._before[name, key] = self._noted(value, [_MOST_ENTRIES])

    def _own(self, tensor: Tensor) -> None:
        memory = _memory_of(tensor)
        if memory is not None:
            self._owners.setdefault(memory, []).append(tensor)
            self._versions.append((tensor, tensor._version))

    def _noted(self, value: Any, left: list[int]) -> Any:
        """Return a record of a value: copy containers and arrays, register tensors by their memory."""
        left[0] -= 1
        if left[0] < 0:
            return _Unknown
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, Tensor):
            self._own(value)
            return value
        if isinstance(value, np.ndarray) and value.dtype != object:
            self._containers.append((value, value.copy()))
            return value.copy()
        items = _items(value)
        if items is None:
            return _Unknown
        if not isinstance(value, tuple):
            self._containers.append((value, value.copy()))
        return type(value).__name__, [self._noted(each, left) for each in items]

    def before_write(self, tensors: Iterable[Tensor]) -> None:
        """Copy each recorded tensor whose memory an operation is about to write to, the first time."""
        for tensor in tensors:
            for owner in self._owners.get(_memory_of(tensor) or 0, ()):
                if id(owner) not in self._copies:
                    self._copies[id(owner)] = owner, local(owner.detach()).clone()

    def written(self) -> dict[str, Written]:
        """Return copies of the values that differ from this snapshot, by name."""
        found = {}
        for name, module in self._modules:
            for key, value in _attributes(module) if self._looks_at_attributes else ():
                before = self._before.get((name, key), None)
                if not self._is_same(before, value):
                    found[_joined(name, key)] = Written("attribute", _copied(value))
            if not isinstance(module, _STATISTICS):
                for key, buffer in module._buffers.items():
                    if buffer is not None and not self._is_same_buffer(buffer):
                        kind = (
                            "attribute" if key in module._non_persistent_buffers_set else "buffer"
                        )
                        found[_joined(name, key)] = Written(kind, _copied(buffer))
        for name, parameter in self._model.named_parameters() if self._copies else ():
            if id(parameter) in self._copies and not self._is_same(parameter, parameter):
                found[name] = Written("parameter", _copied(parameter))
        return found

    def _is_same_buffer(self, buffer: Tensor) -> bool:
        known = self._buffers.get(id(buffer))
        return known is not None and _close(known[1], buffer.detach(), exact=True)

    def _is_same(self, before: Any, now: Any) -> bool:
        """Return whether an attribute still has its earlier value."""
        if before is _Unknown:
            return True
        if isinstance(before, Tensor):
            copies = self._copies.get(id(before))
            if copies is None and before is now:
                return True
            value = local(before.detach()) if copies is None else copies[1]
            return isinstance(now, Tensor) and _close(value, local(now.detach()), exact=True)
        if isinstance(before, np.ndarray):
            return isinstance(now, np.ndarray) and bool(
                np.array_equal(before, now, equal_nan=False)
            )
        if isinstance(before, tuple):
            items = _items(now)
            if items is None or before[0] != type(now).__name__ or len(before[1]) != len(items):
                return False
            return all(map(self._is_same, before[1], items))
        return type(before) is type(now) and bool(before == now or before != before)

    def restore(self) -> None:
        """Restore the model, its gradients and the generators; raise if the model cannot be restored."""
        try:
            with torch.no_grad():
                self._restore()
        except Exception as error:
            raise StateError(
                "step: model must be one that can be put back after the forwards of a check, got "
                f"{type(error).__name__}: {error}; load a checkpoint, and use build(..., check_loss=False)"
            ) from error
        for parameter, grad in self._grads:
            parameter.grad = grad
        self._copies.clear()
        self.restore_random()

    def _restore(self) -> None:
        for found, was in self._dicts:
            found.clear()
            found.update(was)
        for names, were in self._sets:
            names.clear()
            names.update(were)
        for buffer, value in self._buffers.values():
            _write(buffer, value)
        for owner, value in self._copies.values():
            _write(local(owner.detach()), value)
        for container, copy in self._containers:
            # Skip a container that has not changed: the container may refuse writes.
            if not _has_entries(container, copy):
                _refill(container, copy)

    def check_watched(self) -> None:
        """Raise if a forward wrote to a tensor that has no copy, or if runs draw different random numbers."""
        if not self._random.ends_alike():
            raise CannotReplayError(
                "its parts draw other random numbers: those of Python, NumPy or torch depend on the rows"
            )
        for owner, version in self._versions:
            if owner._version != version and id(owner) not in self._copies:
                shape = list(owner.shape)
                raise StateError(
                    "step: model must write the same parameters and attributes in each forward, got one that "
                    f"has written a tensor of shape {shape} for some rows alone, which the check cannot put "
                    "back; load a checkpoint, and use build(..., check_loss=False)"
                )

    def restore_random(self) -> None:
        """Restore the states of the random generators."""
        self._random.restore()


class _Random:
    """The states of Python's, NumPy's and torch's generators, in the native format of each library."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = self._now()
        self._ends: tuple[Any, ...] | None = None
        """The states after the first run."""

    def _now(self) -> tuple[Any, ...]:
        numpy: Any = np.random.get_state(legacy=True)
        states = random.getstate(), numpy, torch.get_rng_state()
        if self._device.type == "cpu":
            return states
        return *states, torch.get_device_module(self._device).get_rng_state(self._device)

    def ends_alike(self) -> bool:
        """Return whether this run has left the generators in the same states as the first run did."""
        now = self._now()
        self._ends = self._ends or now
        return _are_same(now, self._ends)

    def restore(self) -> None:
        """Restore the states, unless the generators still have them."""
        if _are_same(self._now(), self._states):
            return
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        torch.set_rng_state(self._states[2])
        for state in self._states[3:]:
            torch.get_device_module(self._device).set_rng_state(state, self._device)


def _are_same(states: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return (
        states[0] == others[0]
        and states[1][2:] == others[1][2:]
        and np.array_equal(states[1][1], others[1][1])
        and all(map(torch.equal, states[2:], others[2:]))
    )


def _write(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape != value.shape or tensor.dtype != value.dtype:
        # A forward has changed the shape or dtype of the tensor, so replace the tensor's data.
        tensor.data = value.clone()
    else:
        tensor.copy_(value)


def _has_entries(container: Any, copy: Any) -> bool:
    """Return whether a container still holds the same objects as its copy, in the same order."""
    now, before = _items(container), _items(copy)
    if now is None or before is None or len(now) != len(before):
        return False
    return all(each is other for each, other in zip(now, before, strict=True))


def _refill(container: Any, copy: Any) -> None:
    if isinstance(container, np.ndarray):
        container[...] = copy
    elif isinstance(container, list):
        container[:] = copy
    elif isinstance(container, deque):
        container.clear()
        container.extend(copy)
    else:
        container.clear()
        container.update(copy)


@cache
def _internal() -> frozenset[str]:
    """Return the names of the attributes that torch gives to every module."""
    return frozenset(vars(nn.Module()))


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    internal = _internal()
    return [(key, value) for key, value in vars(module).items() if key not in internal]


def _items(value: Any) -> Sequence[Any] | None:
    """Return the entries of a container; None for any other value."""
    if isinstance(value, dict):
        return [each for pair in value.items() for each in pair]
    if isinstance(value, list | tuple | deque):
        return list(value)
    if isinstance(value, set):
        return sorted(value, key=repr)
    return None


def _copied(value: Any, left: list[int] | None = None) -> Any:
    """Return a copy that later runs do not write to."""
    left = [_MOST_ENTRIES] if left is None else left
    left[0] -= 1
    if isinstance(value, Tensor):
        return local(value.detach()).clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    items = _items(value) if left[0] > 0 else None
    if items is not None:
        return [_copied(each, left) for each in items]
    return value if isinstance(value, _PLAIN) else _Unknown


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def are_close(value: Any, other: Any) -> bool:
    """Return whether two written values are equal up to rounding."""
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        both = isinstance(value, Tensor) and isinstance(other, Tensor)
        return both and _close(value, other)
    if isinstance(value, np.ndarray) or isinstance(other, np.ndarray):
        both = isinstance(value, np.ndarray) and isinstance(other, np.ndarray)
        return both and value.shape == other.shape and bool(np.allclose(value, other))
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(are_close, value, other))
    if isinstance(value, float) and isinstance(other, float):
        return abs(value - other) <= 1e-8 * max(abs(value), abs(other)) or value != value
    return bool(value == other)


def _close(value: Tensor, other: Tensor, *, exact: bool = False) -> bool:
    if value.shape != other.shape or value.dtype != other.dtype or value.layout != other.layout:
        return False
    if value.layout is not torch.strided or value.is_quantized:
        return True
    if exact or not (value.is_floating_point() or value.is_complex()):
        return bool(torch.equal(value, other)) or bool(((value == other) | (value != value)).all())
    relative = _EXACT.get(value.dtype, _ROUNDING)
    largest = torch.maximum(value.abs(), other.abs()).max() if value.numel() else 0.0
    return bool(((value - other).abs() <= relative * largest).all())


def _memory_of(tensor: Tensor) -> int | None:
    with suppress(Exception):
        # Tensor subclasses and non-strided tensors may have no storage, so their memory is unknown.
        return int(local(tensor).untyped_storage()._cdata)
    return None


@cache
def _written_by(op: Any) -> tuple[tuple[int, str], ...]:
    """Return places and names of the arguments that an operation of torch writes to."""
    return tuple(
        (place, each.name)
        for place, each in enumerate(op._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    )


def tensors_written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation is about to write to."""
    for place, name in _written_by(op):
        found = args[place] if place < len(args) else kwargs.get(name)
        for each in found if isinstance(found, list | tuple) else (found,):
            if isinstance(each, Tensor):
                yield each
