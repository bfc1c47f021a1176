"""Run the step of torch's fused optimizers by one kernel call for each parameter group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from accel_fn.core.torch_internals import has_hooks, is_profiling, unwrapped_step

_SETTINGS = {
    Adam: ("weight_decay", "eps", "amsgrad", "maximize"),
    AdamW: ("weight_decay", "eps", "amsgrad", "maximize"),
    SGD: ("weight_decay", "momentum", "dampening", "nesterov", "maximize"),
}
"""For each optimizer with a known kernel: the settings of a group that the kernel takes
unchanged."""
_kind = attrgetter("dtype", "device", "layout")
_device = attrgetter("device")
_steps, _means = itemgetter("step"), itemgetter("exp_avg")
_squares, _largest = itemgetter("exp_avg_sq"), itemgetter("max_exp_avg_sq")


class _Call(NamedTuple):
    kernel: Callable[..., None]
    tensors: Sequence[Sequence[Tensor]]
    """The kernel's lists: parameters, gradients and tensors of the optimizer's state."""
    settings: dict[str, Any]
    steps: list[Tensor]
    """The step counts in `tensors`; empty for SGD."""


def run_fused(
    optimizer: Optimizer,
    gradients: Sequence[Tensor | None],
    factor: Tensor | None,
    ok: Tensor | None,
) -> bool:
    """Do the work of `optimizer.step()` on `factor * gradients`, by kernel calls alone.

    It does nothing if torch would run more than the kernel. Examples are an optimizer of another
    class or with hooks, a profiler, the first step, which makes the optimizer's state, and a group
    with tensors of several dtypes or devices.

    Args:
        optimizer: each call reads its current groups, settings and state.
        gradients: one gradient or None for each parameter of its groups.
        factor: [], float32; None means 1.
        ok: [], bool: if False, the kernel changes nothing. None: it runs.

    Returns:
        Whether this function has run the step.
    """
    calls = _calls(optimizer, gradients)
    if calls is None:
        return False
    read = {each.device for each in (factor, ok) if each is not None}
    if read and any(read != {each.tensors[0][0].device} for each in calls):
        return False
    if "step" in vars(optimizer):
        # torch's schedulers check this flag and warn if `step` was not called.
        optimizer._opt_called = True  # type: ignore[attr-defined]
    scale = None if factor is None else factor.reciprocal()
    found = None if ok is None else (~ok).float()
    enabled = torch.is_grad_enabled()
    # Set the gradient mode directly: a context manager would take four more calls.
    torch._C._set_grad_enabled(False)
    try:
        for each in calls:
            if each.steps:
                torch._foreach_add_(each.steps, 1)
            each.kernel(*each.tensors, grad_scale=scale, found_inf=found, **each.settings)
            if each.steps and found is not None:
                torch._foreach_sub_(each.steps, [found] * len(each.steps))
    finally:
        torch._C._set_grad_enabled(enabled)
    return True


def _calls(optimizer: Optimizer, gradients: Sequence[Tensor | None]) -> list[_Call] | None:
    """Return a kernel call for each group with gradients; None if `step` would run other code."""
    kind = type(optimizer)
    if kind not in _SETTINGS or not _runs_alone(optimizer, kind):
        return None
    groups = optimizer.param_groups
    if sum([len(group["params"]) for group in groups]) != len(gradients):
        # Some parameters require no gradient. `gradients` has no entry for these, so it cannot be
        # divided by the sizes of the groups.
        return None
    start, calls = 0, []
    for group in groups:
        parameters = group["params"]
        grads = gradients[start : start + len(parameters)]
        start += len(parameters)
        present = [pair for pair in zip(parameters, grads, strict=True) if pair[1] is not None]
        if present:
            call = _call(optimizer, group, [*zip(*present, strict=True)])
            if call is None:
                return None
            calls.append(call)
    return calls


def _runs_alone(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Return whether a call of `step` runs torch's code only: no hooks, and no profiler.

    A wrapper that a scheduler of torch has put around `step` is allowed.
    """
    own: Any = vars(optimizer).get("step")
    is_torchs = own is None or (
        hasattr(own, "_wrapped_by_lr_sched") and getattr(own, "__wrapped__", None) is kind.step
    )
    return (
        is_torchs
        and unwrapped_step(kind) is not None
        and not has_hooks(optimizer)
        and not is_profiling()
    )


def _call(
    optimizer: Optimizer, group: Mapping[str, Any], present: Sequence[Sequence[Tensor]]
) -> _Call | None:
    """Return the kernel call for one group; None if `step` would run other code."""
    parameters, gradients = present
    kind: Any = type(optimizer)
    states: list[Any] = [*map(optimizer.state.get, parameters)]
    kinds = {*map(_kind, parameters), *map(_kind, gradients)}
    if not group["fused"] or len(kinds) != 1 or kinds.pop()[2] is not torch.strided:
        return None
    settings: dict[str, Any] = {name: group[name] for name in ("lr", *_SETTINGS[kind])}
    lr = settings["lr"]
    if isinstance(lr, Tensor) and lr.device != parameters[0].device:
        return None
    if kind is SGD:
        momenta = []
        if group["momentum"] != 0:
            momenta = [each.get("momentum_buffer") for each in states if each]
            if len(momenta) != len(parameters) or any(each is None for each in momenta):
                return None
        settings["is_first_step"] = False
        return _Call(torch._fused_sgd_, (parameters, gradients, momenta), settings, [])
    if group["differentiable"] or group["capturable"] or not all(states):
        return None
    settings["beta1"], settings["beta2"] = group["betas"]
    if isinstance(settings["beta1"], Tensor) or isinstance(settings["beta2"], Tensor):
        # The kernel takes betas as numbers only. torch's own step reads betas that are tensors.
        return None
    steps = [*map(_steps, states)]
    largest = [*map(_largest, states)] if group["amsgrad"] else []
    lists = (
        parameters,
        gradients,
        [*map(_means, states)],
        [*map(_squares, states)],
        largest,
        steps,
    )
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    return _Call(kernel, lists, settings, steps)
