"""with_amp: forward and loss under autocast, with a loss scale for float16 and products in float8."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from accel_fn.base.launch_options import FromLaunch, Unsaid, launch_options
from accel_fn.base.state import DistState, LossScale
from accel_fn.errors import ArgumentError, PlanError, message
from accel_fn.step.plan import Plan, Transform
from accel_fn.transforms.amp.float8 import Float8, in_float8, torchao

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
}


def with_amp(
    precision: str | torch.dtype | None = None,
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> Transform:
    """Run forward and loss under autocast; float16 also gets a loss scale in the state.

    The same on a CPU as on a GPU. With "fp16", a gradient that is not finite on
    any rank skips the update on all, multiplies the scale by `backoff_factor`
    on all, and `report.applied` is False. The check is of the gradients' global
    norm, so gradients whose norm is beyond float32 count as not finite too.

    "fp8" is bf16, and beside it the products of linear layers whose sizes are multiples of 16
    are computed in float8: inputs, weights and gradients of outputs, each scaled by its own
    largest value, by torchao. Layers and parameters stay what they are. Without an accelerator
    the same roundings are emulated, slowly.

    Law: scaling by any power of two changes nothing, as long as nothing leaves the range. "fp8"
    is the training of torchao's own layers; since the largest value of a part is not that of
    the batch, ranks and micro-batches agree to roundings of float8 alone.

    Args:
        precision: "bf16", "fp16", "fp8", `torch.bfloat16` or `torch.float16`; default: what the
            launch says, by `--mixed-precision` or ACCEL_FN_MIXED_PRECISION, and no autocast
            where it says "no" or nothing.
        init_scale: the first loss scale, finite and > 0. This and what follows is for float16.
        growth_factor: > 1.
        backoff_factor: in (0, 1).
        growth_interval: number of good steps in a row before the scale grows, >= 1.

    Returns:
        A transform. With float16, the report's `grad_norm` is always there.

    Raises:
        ValueError: an argument is outside its range. From `build`, on all ranks, for "fp8": a
            device without it, or a model without such layers.
        ModuleNotFoundError: "fp8" without torchao, the extra `float8`.

    Cost: bf16 none beside autocast's own. fp16 one read of the gradients for
    their norm, shared with `clip`; no host synchronisation with a fused
    optimizer, one with any other, and with fused SGD whose momenta are not all there yet:
    in its first update, as a rule.

    Source: Micikevicius et al. 2018, arXiv:1710.03740.

    >>> import accel_fn as af
    >>> af.with_amp("bf16")(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=num_samples, contexts=[autocast(dtype=torch.bfloat16)])
    """
    settings: dict[str, Any] = {
        "init_scale": init_scale,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
    }
    LossScale.start(**settings)  # refuse bad settings here, not in build
    dtype, bind = _dtype(precision)
    contexts: tuple[Any, ...] = () if dtype is None else (bind(autocast, dtype=dtype),)
    if precision == "fp8":
        torchao()  # refuse its absence here, not in build
        contexts = (*contexts, Float8(in_float8))
    starts = {None: (bind(without_autocast),), torch.float16: (bind(scale_loss, **settings),)}
    starting = starts.get(dtype, ())

    def amp_plan(plan: Plan) -> Plan:
        return replace(plan, contexts=(*plan.contexts, *contexts), starts=(*plan.starts, *starting))

    return amp_plan


def _dtype(precision: str | torch.dtype | None) -> tuple[torch.dtype | None, type[partial[Any]]]:
    """The dtype of autocast, None for no autocast, and who says so."""
    if precision is None:
        said = launch_options().mixed_precision
        return _DTYPES.get(said or "no"), Unsaid if said is None else FromLaunch
    if precision not in _DTYPES:
        rule = 'be "bf16", "fp16", "fp8", torch.bfloat16 or torch.float16'
        raise ArgumentError(message("with_amp", "precision", rule, precision))
    return _DTYPES[precision], partial


def without_autocast(state: DistState) -> DistState:
    """The state as it is: for `explain` alone, and of no cost to a step."""
    return state


def autocast(state: DistState, *, dtype: torch.dtype) -> torch.autocast:
    """The context of forward and loss."""
    return torch.autocast(state.device.type, dtype)


def scale_loss(state: DistState, *, init_scale: float, **rule: Any) -> DistState:
    """The state with a loss scale; one that is there already (another step's) stays."""
    if state.scaler is None:
        scaler = LossScale.start(init_scale, device=state.device, **rule)
        return replace(state, scaler=scaler)
    there = {name: getattr(state.scaler, name) for name in rule}
    if there != rule:
        raise PlanError(
            f"build: with_amp must agree with the loss scale that the state has, got {rule} "
            f"against {there}; give both steps the same settings, or each a state of its own"
        )
    return state
