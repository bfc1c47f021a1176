"""A trial of an optimizer: compare its updates of small shards with those of whole tensors."""

from __future__ import annotations

import copy
import re
import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from accel_fn.core import primitives
from accel_fn.core.dtensor import WholeNumbers, local, shard_like
from accel_fn.core.restored import exclusive_random, has_modes, is_same_random, random_state
from accel_fn.core.state import DistState
from accel_fn.core.warn import warn_user
from accel_fn.errors import LossError, PlanError

Group = dict[str, Any]
LengthFn = Callable[[int], int]
"""A function from a parameter's number of rows to the number of rows of its small stand-in."""
NUM_UPDATES = 3
_LENGTH = 3
"""The most elements along each dimension of a small tensor except the first."""
_REPAIR = "use wrap_ddp, or an optimizer of torch.optim, such as AdamW"


def try_optimizer(
    optimizer: Optimizer, state: DistState, ranks: DistState, mesh: DeviceMesh
) -> None:
    """Refuse, on all ranks, an optimizer that updates shards differently from whole parameters.

    It does not refuse an optimizer that cannot be copied, or whose copy fails on small whole
    tensors.

    Cost: for an optimizer that is not torch's, or that has complex parameters, a few updates of
    small tensors, and two collectives.
    """
    is_known = type(optimizer).__module__.startswith("torch.optim.")
    given = [each for group in optimizer.param_groups for each in group["params"]]
    # Try the optimizers of torch on complex parameters too: torch 2.13 views unevenly cut complex
    # vectors as wrong real vectors, without an error.
    if is_known and not any(each.is_complex() for each in given):
        return
    size, fault = mesh.size(mesh.ndim - 1), ""
    expected, draws = _updated_whole(optimizer, state, partial(_length, size))
    if expected:
        try:
            with WholeNumbers():  # type: ignore[no-untyped-call]
                fault = _fault_on_shards(optimizer, state, mesh, expected)
            fault = fault or _fault_on_nothing(optimizer, state, size)
        except LossError:
            fault = (
                "it reads a number of what it computes from shards, of which each rank has its part"
            )
        except Exception as error:
            fault = f"it fails, {_reason(error)}"
    faults = primitives.exchange(fault, ranks, "build")
    name = type(optimizer).__name__
    if any(faults):
        raise PlanError(
            "build: wrap_fsdp must have an optimizer whose updates of shards are those of whole parameters, "
            f"got {name}: {next(filter(None, faults))}; {'use wrap_ddp' if is_known else _REPAIR}"
        )
    if draws and state.is_main:
        warn_user(
            f"build: wrap_fsdp should have an optimizer that draws no random numbers, got {name}, whose "
            f"draws for shards are others than for whole parameters; {_REPAIR}"
        )


def _length(size: int, first: int) -> int:
    """Return the number of rows of a small tensor that stands for a parameter with `first` rows.

    The number is divisible by `size` if and only if `first` is divisible by `size`.
    """
    # Give every rank rows. The update of a rank without rows may fail, and the other ranks would
    # deadlock.
    return 3 * size - 1 if first % size else 2 * size


def _length_or_none(size: int, first: int) -> int:
    return 0 if first < size else _length(size, first)


def _reason(error: Exception) -> str:
    """Return an error's first sentence; without a message, the innermost line outside of torch."""
    sentence, *_ = re.split(r"[.:!](?:\s|$)", str(error), maxsplit=1)
    if sentence:
        return f"{type(error).__name__} ({sentence})"
    frames = reversed(traceback.extract_tb(error.__traceback__))
    # Leave out our own frames: those of `WholeNumbers` are among the frames of torch.
    ours = Path(__file__).parents[2]
    others = [each for each in frames if not Path(each.filename).is_relative_to(ours)]
    lines = [each.line for each in others if "torch" not in Path(each.filename).parts]
    return f"{type(error).__name__} at {lines[0] if lines else 'a line of torch'}"


def _fault_on_nothing(optimizer: Optimizer, state: DistState, size: int) -> str:
    """Update parameters without rows; return the failure, or "" if there is none.

    If a parameter has fewer rows than there are ranks, some ranks hold shards without rows.
    """
    groups = optimizer.param_groups
    if all(len(each) >= size for group in groups for each in group["params"] if each.ndim):
        return ""
    with exclusive_random(state.device):
        try:
            _update(*_twin(optimizer, state, partial(_length_or_none, size), _whole), _whole)
        except Exception as error:
            return f"it fails on a rank that holds no row of a parameter, {_reason(error)}"
    return ""


def _updated_whole(
    optimizer: Optimizer, state: DistState, length_of: LengthFn
) -> tuple[list[tuple[Tensor, Tensor]], bool]:
    """Update whole tensors; return them before and after, and whether the optimizer draws numbers.

    If the updates fail or draw random numbers, the list is empty.
    """
    with exclusive_random(state.device):
        before = random_state(state.device)
        try:
            twin, parameters = _twin(optimizer, state, length_of, _whole)
            starts = [each.detach().clone() for each in parameters]
            _update(twin, parameters, _whole)
        except Exception:
            # A copy may fail: an optimizer may read the model, or make its state in `__init__`. Do
            # not try such an optimizer, since the failure may not concern shards.
            return [], False
        if not is_same_random(before, random_state(state.device)):
            return [], True
    return [*zip(starts, (each.detach() for each in parameters), strict=True)], False


def _fault_on_shards(
    optimizer: Optimizer, state: DistState, mesh: DeviceMesh, expected: list[tuple[Tensor, Tensor]]
) -> str:
    """Run the updates of `_updated_whole` on shards; describe a difference from `expected`, or return ""."""
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]

    def cut(whole: Tensor) -> Tensor:
        # Without a source rank, every rank cuts its own copy, and torch sends nothing.
        found: Tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        return found

    length_of = partial(_length, mesh.size(mesh.ndim - 1))
    twin, parameters = _twin(optimizer, state, length_of, cut)
    _update(twin, parameters, cut)
    for parameter, (start, wanted) in zip(parameters, expected, strict=True):
        found, wanted_here = local(parameter), local(cut(wanted))
        eps = torch.finfo(wanted.dtype).eps
        moved = float((wanted - start).abs().max())
        bound = eps**0.5 * moved + 8 * eps * float(wanted.abs().max())
        off = (found - wanted_here).abs()
        if off.numel() and not bool((off <= bound).all()):
            share = float(off.max()) / (moved or 1.0)
            shape = list(wanted.shape)
            return f"an update of a parameter of shape {shape} is off by {share:.2g} of its size"
    return ""


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _update(
    twin: Optimizer, parameters: list[nn.Parameter], place: Callable[[Tensor], Tensor]
) -> None:
    """Run a few updates, with the same gradients in every trial."""
    if has_modes(twin):
        twin.train()  # type: ignore[attr-defined]
    for number in range(NUM_UPDATES):
        for each in parameters:
            each.grad = place(_values(each, 1.3 + number).cos())
        twin.step()


def _values(like: Tensor, speed: float) -> Tensor:
    """Return a tensor of this shape and dtype whose numbers do not repeat."""
    counts = torch.arange(1, like.numel() + 1, device=like.device, dtype=torch.float64)
    return (counts * speed).view(like.shape).to(like.dtype)


def _twin(
    optimizer: Optimizer,
    state: DistState,
    length_of: LengthFn,
    place: Callable[[Tensor], Tensor],
) -> tuple[Any, list[nn.Parameter]]:
    """Copy an optimizer onto small parameters, one for each kind in a group.

    Return the copy and its parameters that require a gradient.
    """
    twins = _Twins(state.device, length_of, place)
    twin = twins.copied(optimizer)
    kept: list[Group] = []
    for group in twin.param_groups:
        group["params"][:] = dict.fromkeys(group["params"])
        if not any(_is_alike(group, each) for each in kept):
            kept.append(group)
    twin.param_groups[:] = kept
    return twin, [p for group in kept for p in group["params"] if p.requires_grad]


def _is_alike(group: Group, other: Group) -> bool:
    """Return whether groups differ only in the values of floats, tensors and parameters."""

    def kinds(settings: Group) -> dict[str, Any]:
        names = [name for name in settings if name != "params"]
        return {
            name: None if isinstance(settings[name], float | Tensor) else repr(settings[name])
            for name in names
        } | {"": [*map(_shape_of, settings["params"])]}

    return kinds(group) == kinds(other)


def _shape_of(parameter: Tensor) -> tuple[Any, ...]:
    return tuple(parameter.shape), parameter.dtype, parameter.requires_grad


class _Twins:
    """Copies an optimizer's objects; small tensors stand in for its parameters and their state."""

    def __init__(
        self, device: torch.device, length_of: LengthFn, place: Callable[[Tensor], Tensor]
    ) -> None:
        self._device, self._length_of, self._place = device, length_of, place
        self._made: dict[int, Any] = {}
        self._kinds: dict[Any, nn.Parameter] = {}

    def copied(self, value: Any) -> Any:
        """Copy containers, tensors, generators and optimizers; return other values unchanged."""
        made = self._made.get(id(value))
        if made is not None:
            return made
        if isinstance(value, Optimizer):
            return self._of_optimizer(value)
        if isinstance(value, Tensor):
            found: Any = value.detach().clone()
        elif isinstance(value, torch.Generator):
            found = value.clone_state()
        elif isinstance(value, dict):
            found = self._made[id(value)] = copy.copy(value)
            for name, each in value.items():
                found[name] = self.copied(each)
        elif isinstance(value, list):
            found = self._made[id(value)] = []
            found += map(self.copied, value)
        elif type(value) is tuple:
            found = tuple(map(self.copied, value))
        elif isinstance(value, MethodType) and id(value.__self__) in self._made:
            found = MethodType(value.__func__, self._made[id(value.__self__)])
        else:
            return value
        self._made[id(value)] = found
        return found

    def _of_optimizer(self, optimizer: Optimizer) -> Any:
        twin: Any = object.__new__(type(optimizer))
        self._made[id(optimizer)] = twin
        for number, group in enumerate(optimizer.param_groups):
            for each in group["params"]:
                self._made.setdefault(id(each), self._small(each, number))
        if id(optimizer.state) not in self._made:
            self._made[id(optimizer.state)] = self._state(optimizer.state)
        for name, value in vars(optimizer).items():
            # Leave out hooks, and a `step` that a scheduler has wrapped: they would run on the
            # user's optimizer.
            if name.endswith("_hooks"):
                vars(twin)[name] = OrderedDict()
            elif name != "step":
                vars(twin)[name] = self.copied(value)
        return twin

    def _small(self, parameter: Tensor, group: int) -> nn.Parameter:
        """Return the small parameter that represents all parameters of this kind in a group."""
        first, *others = parameter.shape
        shape = (self._length_of(first), *(min(each, _LENGTH) for each in others))
        kind = group, shape, parameter.dtype, parameter.requires_grad
        if kind not in self._kinds:
            empty = torch.empty(shape, dtype=parameter.dtype, device=self._device)
            start = _values(empty, 0.7).sin()
            made = nn.Parameter(self._place(start), requires_grad=parameter.requires_grad)
            self._kinds[kind] = made
        return self._kinds[kind]

    def _state(self, state: Mapping[Any, Any]) -> Any:
        """Copy the state that `__init__` made, with small tensors in place of those of a parameter's shape.

        A small tensor repeats the first value of the original.
        """
        made = defaultdict[Any, Any](dict)
        for parameter, held in state.items():
            twin = self._made.get(id(parameter), parameter)
            is_like = isinstance(held, dict) and isinstance(parameter, Tensor)
            made[twin] = (
                {name: self._like(each, parameter, twin) for name, each in held.items()}
                if is_like
                else self.copied(held)
            )
        return made

    def _like(self, value: Any, parameter: Tensor, twin: Tensor) -> Any:
        if not isinstance(value, Tensor) or not value.ndim or value.shape != parameter.shape:
            return self.copied(value)
        first = value.detach().flatten()[:1].to(self._device)
        return shard_like(first.expand(twin.shape).contiguous(), twin) if first.numel() else value
