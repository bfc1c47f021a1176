"""The update of a step in two stages: `prepare` decides and may raise; `apply` writes parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, starmap

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from accel_fn.core.dtensor import local, note_shards, shard_like
from accel_fn.core.fused_step import run_fused
from accel_fn.core.grads import Grads
from accel_fn.core.plan import Plan, describe
from accel_fn.core.report import Report
from accel_fn.core.state import DistState
from accel_fn.core.torch_internals import is_listened_to, run_optimizer
from accel_fn.errors import ArgumentTypeError, message

_TRANSFORM_REPAIR = "compute with shards alone, or with full_tensor() of each, or use wrap_ddp"
_OPTIMIZER_REPAIR = "use wrap_ddp, or an optimizer of torch.optim, such as AdamW"
Trained = tuple[Optimizer, Sequence[nn.Parameter]]
"""An optimizer, and its parameters that require a gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """An update that is decided and not applied yet."""

    grads: Grads
    report: Report
    accepted: Tensor | None
    """Whether the update is applied, [], bool. None means that it always is."""
    finite: Tensor | None
    """Whether the loss scale counts the gradients as finite, [], bool. None without a loss
    scale."""


def prepare(plan: Plan, state: DistState, grads: Grads, report: Report) -> Prepared:
    """Accept or refuse the gradients, then transform them, without a change of parameters."""
    # Only this check adjusts the loss scale: a spike that `accept` refuses is not an overflow of
    # float16.
    finite = None if state.scaler is None else torch.isfinite(grads.norm())
    accepted = finite
    for accept in plan.accept:
        verdict = accept(state, grads)
        accepted = verdict if accepted is None else accepted & verdict
    for gradient_transform in plan.gradients:
        try:
            grads = gradient_transform(state, grads)
        except Exception as error:
            note_shards(error, describe(gradient_transform), _TRANSFORM_REPAIR)
            raise
        if not isinstance(grads, Grads):
            rule = f"return Grads, {describe(gradient_transform)} does not"
            raise ArgumentTypeError(message("step", "gradients", rule, type(grads).__name__))
    return Prepared(grads, report, accepted, finite)


def apply(
    plan: Plan, state: DistState, prepared: Prepared, trained: Sequence[Trained], always: Tensor
) -> tuple[DistState, Report]:
    """Run the optimizers and adjust the loss scale. `always` is `applied` if every update is applied."""
    grads, accepted, report = prepared.grads, prepared.accepted, prepared.report
    verdict = accepted
    if accepted is not None and not (accepted.is_cpu or all(starmap(_reads_on_device, trained))):
        # Copy the verdict here, so that the host waits once for all optimizers and schedules.
        verdict = accepted.cpu()
    tensors = iter(grads.tensors)
    for optimizer, parameters in trained:
        own = tuple(islice(tensors, len(parameters)))
        try:
            apply_update(optimizer, parameters, Grads(own, grads.factor), verdict)
        except Exception as error:
            note_shards(error, type(optimizer).__name__, _OPTIMIZER_REPAIR)
            raise
    for stateful in (*plan.accept, *plan.gradients):
        if hasattr(stateful, "commit"):
            stateful.commit()
    norm = grads.norm_read
    report = Report(
        loss=report.loss,
        weight=report.weight,
        samples=report.samples,
        grad_norm=None if norm is None else norm.float(),
        applied=always if accepted is None else accepted,
        metrics=report.metrics,
        terms=report.terms,
        counts=report.counts,
        extras=report.extras,
        _verdict=verdict,
    )
    scaler = state.scaler
    if scaler is not None and prepared.finite is not None:
        scaler = scaler.adjust(prepared.finite)
    return state.advanced(scaler, report.samples, report.weight), report


def apply_update(
    optimizer: Optimizer, parameters: Sequence[Tensor], grads: Grads, ok: Tensor | None
) -> None:
    """Run the optimizer on `factor * tensors`, or not at all if `ok` is False.

    The kernel of a fused optimizer takes the factor and `ok`, as with torch's own GradScaler.
    `run_fused` calls this kernel directly if torch's step would do nothing else. For an optimizer
    without such a kernel, or with hooks or a patched step, the gradients are multiplied in place,
    and the host waits for `ok`. If parameters are on the host, the host waits for factor and `ok`.

    Args:
        optimizer: its step is called as a user would call it, with its hooks.
        parameters: the parameters of `grads.tensors`, in this order.
        grads: used up: their tensors may be overwritten.
        ok: [], bool; None if there is no check.
    """
    factor = _open_factor(grads)
    if ok is not None and ok.is_cpu:
        if not ok:
            return
        ok = None
    is_exact = factor is None or factor.dtype == torch.float32
    if not (is_exact and run_fused(optimizer, grads.tensors, factor, ok)):
        _run_step(optimizer, parameters, grads, factor, ok)


def _run_step(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    grads: Grads,
    factor: Tensor | None,
    ok: Tensor | None,
) -> None:
    """Set the gradients as `.grad` of the parameters, and call the optimizer's step."""
    fused = (factor is not None or ok is not None) and takes_factor(optimizer)
    if fused:
        factor, ok = _where_read(factor, parameters), _where_read(ok, parameters)
    try:
        for parameter, tensor in zip(parameters, grads.tensors, strict=True):
            parameter.grad = tensor
        if ok is not None and not (fused and _can_skip(optimizer)):
            if not ok:
                return
            ok = None
        if factor is not None and not (fused and factor.dtype == torch.float32):
            multiply(grads.present(), factor)
            factor = None
        if factor is not None:
            optimizer.grad_scale = factor.reciprocal()  # type: ignore[attr-defined]
        if ok is not None:
            optimizer.found_inf = (~ok).float()  # type: ignore[attr-defined]
        run_optimizer(optimizer)
    finally:
        for parameter in parameters:
            parameter.grad = None
        if fused:
            vars(optimizer).pop("grad_scale", None)
            vars(optimizer).pop("found_inf", None)


def _open_factor(grads: Grads) -> Tensor | None:
    """Return the factor; None if the host knows, without waiting, that it is 1."""
    factor = grads.factor
    return None if factor is not None and factor.is_cpu and factor.item() == 1.0 else factor


def _reads_on_device(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Return whether the kernel of this optimizer reads the verdict on the device."""
    return takes_factor(optimizer) and not any(each.is_cpu for each in parameters)


def _where_read(value: Tensor | None, parameters: Sequence[Tensor]) -> Tensor | None:
    """Move a value to the host if a fused kernel of offloaded parameters reads the value there."""
    # torch itself would copy the value without waiting, so the kernel on the host could read memory
    # before the value has arrived.
    if value is None or value.is_cpu or not any(each.is_cpu for each in parameters):
        return value
    return value.cpu()


def takes_factor(optimizer: Optimizer) -> bool:
    """Return whether all kernels take `grad_scale` and `found_inf`, and no hook reads gradients."""
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused", True) for group in optimizer.param_groups)
        and not is_listened_to(optimizer)
    )


def _can_skip(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's kernel may skip an update.

    The kernel of SGD may not while a parameter lacks its first momentum: a skipped call would not
    set the momentum.
    """
    return not isinstance(optimizer, SGD) or all(
        "momentum_buffer" in optimizer.state.get(each, ())
        for group in optimizer.param_groups
        if group["momentum"]
        for each in group["params"]
        if each.grad is not None
    )


def multiply(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place. On an accelerator, round the factor to their common dtype first."""
    if not tensors:
        return
    tensors = [local(each) for each in tensors]
    first = tensors[0]
    is_uniform = all(
        (each.dtype, each.device, each.layout) == (first.dtype, first.device, torch.strided)
        for each in tensors
    )
    if is_uniform:
        torch._foreach_mul_(tensors, factor.to(first.device if first.is_cpu else first))
    else:
        for each in tensors:
            each.mul_(factor.to(each.device))


def follow_parameters(optimizer: Optimizer) -> None:
    """Move an optimizer's state to the devices of its parameters, after these were moved.

    Step counts stay on the host, as in torch, unless a kernel reads them.
    """
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            held = optimizer.state.get(parameter, {})
            for name, value in held.items():
                if isinstance(value, Tensor) and (value.ndim or on_device):
                    held[name] = value.to(parameter.device)


def follow_shards(
    optimizer: Optimizer, before: Mapping[str, nn.Parameter], model: nn.Module
) -> None:
    """Replace an optimizer's parameters by their sharded successors, and shard its state to match.

    Its groups, their settings and their order stay.
    """
    now = dict(model.named_parameters())
    replaced = {old: now[name] for name, old in before.items() if now.get(name, old) is not old}
    for group in optimizer.param_groups if replaced else ():
        group["params"][:] = [replaced.get(each, each) for each in group["params"]]
    for old, new in replaced.items():
        if old in optimizer.state:
            held = optimizer.state.pop(old)
            optimizer.state[new] = {name: _cut(each, new) for name, each in held.items()}


def _cut(value: object, parameter: Tensor) -> object:
    """Shard a value of an optimizer's state like the parameter, if both have the same shape."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return shard_like(value, parameter)
