"""Models without values: on the meta device until `build` allocates memory for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from accel_fn.core import primitives
from accel_fn.core.dtensor import is_sharded, local
from accel_fn.core.observers import Observer
from accel_fn.core.plan import Plan, unwrapped
from accel_fn.core.state import DistState
from accel_fn.core.update import follow_shards
from accel_fn.errors import ArgumentError, ArgumentTypeError, PlanError, StateError, message

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)
_UNFILLED = "accel_fn_unfilled"
"""The attribute that marks a tensor whose memory `build` has allocated, until all values are
set."""
_MOST_NAMED = 3


class _Making(threading.local):
    """Whether this thread makes a model in `empty`. Simulated ranks are threads."""

    on = False


_making = _Making()


def empty(fn: Callable[P, M], *args: P.args, **kwargs: P.kwargs) -> M:
    """Make a model whose parameters take no memory: on the meta device, with shapes only.

    `build` of a plan with `wrap_fsdp` or `wrap_tp` then allocates memory on each rank for its part
    of the parameters, so no rank ever holds the whole model. `load_model` fills it from files. The
    same program runs on one process. Buffers, such as tables of positions, are made as usual: code
    computes them, and files often lack them. Tied parameters stay tied. Each parameter is made, and
    dropped when its module registers it, so the largest one must fit on the host. Parameters of
    other classes than `nn.Parameter` stay as they are made.

    Law: after `load_model`, training is the same as with a model that was made and loaded whole.
    Tests: `tests/laws/law13_born_empty.py`.

    Args:
        fn: makes and returns the model: a class of modules, or `AutoModelForCausalLM.from_config`.
        *args: the arguments of `fn`.
        **kwargs: the keyword arguments of `fn`.

    Returns:
        What `fn` returns.

    Raises:
        TypeError: `fn` is not callable, or returns something other than a module.
        ValueError: a buffer is on the meta device, such as one that is computed from parameters
            (`spectral_norm`).

    Cost: the time of `fn`, without its writes to parameters.

    >>> import torch, accel_fn as af
    >>> model = af.empty(torch.nn.Linear, 4, 1)
    >>> model.weight.device.type, list(model.weight.shape)
    ('meta', [1, 4])
    """
    if not callable(fn):
        raise ArgumentTypeError(message("empty", "fn", "be a function that returns a model", fn))
    _watch_registrations()
    before, _making.on = _making.on, True
    try:
        model = fn(*args, **kwargs)
    finally:
        _making.on = before
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            message("empty", "fn", "return a torch.nn.Module", type(model).__name__)
        )
    found = [name for name, each in model.named_buffers() if each.is_meta]
    if found:
        raise ArgumentError(
            "empty: buffers must be computed from values, got some on the meta device, as those that are "
            f"computed from parameters: {_some(found)}; make the model without empty, or add that part "
            "after load_model"
        )
    return model


@cache
def _watch_registrations() -> None:
    # Never remove the hook: another thread may loop over torch's hooks while it registers a
    # parameter, and a removal would break its loop.
    register_module_parameter_registration_hook(_without_memory)


def _without_memory(_module: nn.Module, _name: str, parameter: nn.Parameter) -> Any:
    """Replace a new parameter by one on the meta device.

    Keep a parameter that is on the meta device already, so that tied modules still share it.
    """
    # Keep subclasses of Parameter, such as quantized or lazy ones: a plain copy would lose their
    # special behaviour.
    if not _making.on or type(parameter) is not nn.Parameter or parameter.is_meta:
        return None
    return _like(parameter, parameter.detach().to("meta"))


def _like(old: Tensor, value: Tensor) -> Tensor:
    """Make a parameter or buffer with this value and the attributes of the old one."""
    new = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
    vars(new).update(vars(old))
    return new


def named_tensors(model: nn.Module, *, remove_duplicate: bool = False) -> dict[str, Tensor]:
    """Return parameters and buffers by their names in the unwrapped model."""
    plain = unwrapped(model)
    return {
        **dict(plain.named_parameters(remove_duplicate=remove_duplicate)),
        **dict(plain.named_buffers(remove_duplicate=remove_duplicate)),
    }


def tensors_in(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Return each parameter and buffer once, with its name."""
    return named_tensors(model, remove_duplicate=True).items()


def check_memory(state: DistState, plan: Plan) -> None:
    """Refuse tensors on the meta device if no transform divides the model's memory among ranks."""
    if state.device.type == "meta" or plan.having("takes_empty"):
        return
    found = [name for name, each in tensors_in(plan.model) if each.is_meta]
    if found:
        raise PlanError(
            "build: model must hold values, or be sharded by wrap_fsdp or wrap_tp, got tensors on the meta "
            f"device: {_some(found)}; add wrap_fsdp(), which gives one process memory too, or call "
            f"model.to_empty(device={state.device.type!r}) and load_model before build"
        )


def move_values(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device, in place; leave its tensors on the meta device where they are."""
    if any(each.is_meta for _, each in tensors_in(model)) and device.type != "meta":
        model._apply(lambda each: each if each.is_meta else each.to(device))  # type: ignore[no-untyped-call]
    else:
        model.to(device)


def give_memory(
    model: nn.Module, device: torch.device, *, shards_on: torch.device | None = None
) -> None:
    """Replace tensors on the meta device by tensors in memory; tied tensors stay tied.

    The new tensors hold NaN, or zeros if their dtype has no NaN. Shards go to the device
    `shards_on`, if it is given.
    """
    of_shards, made = shards_on or device, dict[Tensor, Tensor]()
    for module in model.modules() if device.type != "meta" else ():
        homes: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in homes:
            for name, each in held.items():
                if each is not None and each.is_meta:
                    if each not in made:
                        made[each] = _memory(each, of_shards if is_sharded(each) else device)
                    held[name] = made[each]


def _memory(tensor: Tensor, device: torch.device) -> Tensor:
    value = float("nan") if _has_nan(tensor) else 0
    new = _like(tensor, torch.full_like(tensor, value, device=device, requires_grad=False))
    vars(new)[_UNFILLED] = True
    return new


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def has_gaps(tensor: Tensor) -> bool:
    """Return whether this rank's part of a tensor holds a NaN."""
    return bool(torch.isnan(local(tensor.detach())).any())


def give_memory_to_plan(plan: Plan, device: torch.device) -> None:
    """Allocate memory for the plan's model, and pass the new parameters to its optimizers."""
    before = dict(plan.model.named_parameters())
    give_memory(plan.model, device)
    for optimizer in plan.optimizers.values():
        follow_shards(optimizer, before, plan.model)


def is_unfilled(tensor: Tensor) -> bool:
    """Return whether `build` allocated this tensor and no load has filled it yet."""
    return _UNFILLED in vars(tensor)


def is_empty(model: nn.Module) -> bool:
    """Return whether a part of the model has no values yet."""
    return any(is_unfilled(each) for _, each in tensors_in(model))


def note_filled(model: nn.Module, names: Iterable[str]) -> None:
    """Record that the tensors of these names have values; ignore unknown names."""
    tensors = named_tensors(model)
    for name in names:
        if name in tensors:
            vars(tensors[name]).pop(_UNFILLED, None)


def check_filled(plan: Plan, state: DistState, function: str) -> None:
    """Refuse, on all ranks, a model with unfilled tensors; otherwise, call `on_filled` of slot functions.

    A floating-point tensor without NaN counts as filled, since the program may have written to it.

    Cost: nothing once a model is filled; before, one read of the unfilled tensors, and two small
    collectives.
    """
    open_ = {name: each for name, each in tensors_in(plan.model) if is_unfilled(each)}
    # Loads fill the same tensors on all ranks, so either all ranks reach the exchange below, or
    # none does.
    if open_:
        gaps = [name for name, each in open_.items() if not _has_nan(each) or has_gaps(each)]
        every = {name for names in primitives.exchange(gaps, state, function) for name in names}
        if every:
            missing = [name for name in open_ if name in every]
            raise StateError(
                f"{function}: model must have values before its first step, got none for "
                f"{_some(missing)}; call load_model(model, folder) after build, with init=fn for what no "
                "file holds, or load or resume"
            )
        note_filled(plan.model, open_)
    for each in plan.entries():
        if hasattr(each, "on_filled"):
            each.on_filled()


def _some(names: list[str]) -> str:
    others = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {others} more" if others > 0 else "")


class FilledCheck(Observer):
    """Refuses the first step of a model that is not filled, then removes itself from the step."""

    def __init__(self, plan: Plan, strategy: Any, _state: DistState) -> None:
        self._plan, self._strategy = plan, strategy

    def before(self, state: DistState, batch: Any) -> None:
        """Check the model, then remove this observer from the step."""
        check_filled(self._plan, state, "step")
        observers = self._strategy.observers
        observers.every = tuple([each for each in observers.every if each is not self])
