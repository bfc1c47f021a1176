"""with_amp: autocast for forward and loss; a loss scale for float16; linear layers in float8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from accel_fn.core.plan import Plan, SlotFunction
from accel_fn.core.state import DistState, LossScale
from accel_fn.core.step import Step
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.core.warn import warn_user
from accel_fn.errors import ArgumentError, ArgumentTypeError, PlanError, message
from accel_fn.parallel.blocks import Blocks, check_blocks
from accel_fn.parallel.launch_options import launch_options, source_of
from accel_fn.transforms.amp.float8 import Float8Slot, in_float8, torchao

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
}

# The first two are x86 instructions, the last one is for Arm.
_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")


class AutocastSlot(SlotFunction):
    """`autocast` as a slot function, with a check of the CPU."""

    def validate(self, state: DistState, plan: Plan) -> None:
        """Warn about a CPU that has no instructions for bfloat16 and emulates them."""
        known = torch.cpu.get_capabilities()
        emulated = state.device.type == "cpu" and not any(map(known.get, _BF16_INSTRUCTIONS))
        if emulated and self.keywords["dtype"] == torch.bfloat16 and state.is_main:
            warn_user(
                "build: with_amp should have bf16 on a device with instructions for it, got a CPU "
                "without them, which takes longer than in float32; take with_amp('no')"
            )


@transform
def with_amp(
    precision: str | torch.dtype | None = None,
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    skip: Blocks = None,
) -> Transform:
    """Run forward and loss under autocast; float16 also gets a loss scale in the state.

    A CPU and a GPU behave in the same way. With "fp16", a gradient that is not finite on any rank
    skips the update on all, multiplies the scale by `backoff_factor` on all, and `report.applied`
    is False. The check uses the gradients' global norm, so gradients whose norm is beyond float32
    count as not finite too.

    "fp8" is bf16, with the products of linear layers whose sizes are multiples of 16 computed
    in float8, by torchao: inputs, weights and gradients of outputs, each scaled by its largest
    value. Layers and parameters stay as they are. Without an accelerator, the rounding is
    emulated, slowly.

    Law: scaling by any power of two changes nothing, as long as all numbers stay in range. "fp8"
    trains as torchao's own layers do. The largest value of a part differs from that of the batch,
    so ranks and micro-batches agree only up to roundings of float8.
    Tests: `tests/laws/law07_scaling.py`.

    Args:
        precision: "bf16", "fp16", "fp8", `torch.bfloat16`, `torch.float16`, or "no" for the
            identity; default: the launch's (`--mixed-precision` or ACCEL_FN_MIXED_PRECISION),
            else no autocast.
        init_scale: the first loss scale, finite and > 0. This and the next three are for float16.
        growth_factor: > 1.
        backoff_factor: in (0, 1).
        growth_interval: number of good steps in a row before the scale grows, >= 1.
        skip: for "fp8": a class of modules, several, or names of modules, whose linear layers compute
            in bf16, often the first and the last one.

    Returns:
        A transform. With float16, the report's `grad_norm` is always there.

    Raises:
        ValueError: an argument is outside its range. From `build`, on all ranks, for "fp8": a
            device without it, a model without such layers, or `skip` that matches no module.
        TypeError: `skip` is neither a class of modules nor a name.
        ModuleNotFoundError: "fp8" without torchao, the extra `float8`.

    Cost: with bf16, only autocast's own; a CPU without instructions for bf16 (AVX512_BF16 or AMX on
    x86) emulates it, more slowly than float32, and `build` warns about it. With fp16, one read of
    the gradients for their norm, shared with `clip`; no host synchronisation with a fused optimizer, one
    with any other. (Fused SGD with momentum usually needs one in its first update, when its momenta are
    made.)

    Source: Micikevicius et al. 2018, arXiv:1710.03740.

    >>> import accel_fn as af
    >>> af.with_amp("bf16")(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, forward_contexts=[with_amp('bf16')])
    """
    settings: dict[str, Any] = {
        "init_scale": init_scale,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
    }
    # Make a loss scale to check the settings now, and not only in `build`.
    LossScale.start(**settings)
    check_blocks("with_amp", skip, "skip")
    source = ""
    if precision is None:
        precision, source = launch_options().mixed_precision or "no", source_of("mixed_precision")
    elif precision == "no":
        return fill()
    elif precision not in _DTYPES:
        rule = 'be "no", "bf16", "fp16", "fp8", torch.bfloat16 or torch.float16'
        raise ArgumentError(message("with_amp", "precision", rule, precision))
    dtype = _DTYPES.get(precision)
    if dtype is None:
        return fill(init_state=SlotFunction(without_autocast).with_source(source))
    slots: dict[str, Any] = {
        "forward_contexts": AutocastSlot(autocast, dtype=dtype).with_source(source)
    }
    if dtype == torch.float16:
        slots["init_state"] = SlotFunction(scale_loss, **settings).with_source(source)
    if precision == "fp8":
        # If torchao is not installed, raise now, and not only in `build`.
        torchao()
        in_slot = Float8Slot(in_float8, skip=skip).with_source(source)
        slots["forward_contexts"] = (slots["forward_contexts"], in_slot)
    return fill(**slots)


def compute_dtype(plan: Plan | Step) -> torch.dtype:
    """Find the dtype that a plan's forwards compute in, for parts of yours that should match.

    Frozen encoders and teachers take less memory in this dtype:
    `encoder.to(af.extend.compute_dtype(plan))`.

    Args:
        plan: a plan, or the step that was built from it.

    Returns:
        The dtype of `with_amp`, which is `torch.bfloat16` for "fp8", else the `param_dtype` of
        `wrap_fsdp`, else the dtype of the model's first floating-point parameter.

    Raises:
        TypeError: `plan` is neither a plan nor a step.

    Cost: a check of the plan on the host; nothing runs on the device.

    >>> import accel_fn as af
    >>> plan = af.Plan(loss_fn, model, optimizer)
    >>> af.extend.compute_dtype(plan), af.extend.compute_dtype(af.with_amp("bf16")(plan))
    (torch.float32, torch.bfloat16)
    """
    plan = plan.plan if isinstance(plan, Step) else plan
    if not isinstance(plan, Plan):
        rule, got = "be a Plan or a Step", type(plan).__name__
        raise ArgumentTypeError(message("compute_dtype", "plan", rule, got))
    for each in plan.forward_contexts:
        if isinstance(each, SlotFunction) and each.func is autocast:
            return cast("torch.dtype", each.keywords["dtype"])
    settings = [each.keywords for each in plan.strategy if isinstance(each, SlotFunction)]
    settings += [each["inner"].keywords for each in settings if "inner" in each]
    sharded = [each["param_dtype"] for each in settings if each.get("param_dtype") is not None]
    own = [each.dtype for each in plan.model.parameters() if each.is_floating_point()]
    return next(iter([*sharded, *own]), torch.get_default_dtype())


def without_autocast(state: DistState) -> DistState:
    """Return the state unchanged. `explain` prints this function, to show the setting of the launch."""
    return state


def autocast(state: DistState, *, dtype: torch.dtype) -> torch.autocast:
    """Make the autocast context of forward and loss."""
    return torch.autocast(state.device.type, dtype)


def scale_loss(state: DistState, *, init_scale: float, **rule: Any) -> DistState:
    """Add a loss scale to the state; keep a scale that another step has added."""
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
