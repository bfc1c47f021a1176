"""Products of linear layers in float8, by torchao; each tensor is scaled by its largest value."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from accel_fn.core.plan import ContextFn, Plan, Stateful
from accel_fn.core.restored import with_forwards
from accel_fn.core.state import DistState
from accel_fn.errors import ExtraError, PlanError
from accel_fn.parallel.blocks import Blocks, modules_in

# Kernels for float8 multiply matrices whose sizes are multiples of 16.
_MULTIPLE = 16
# The first NVIDIA devices with float8 are Ada (8.9) and Hopper (9.0).
_FIRST_CAPABILITY = (8, 9)


class Float8Slot(Stateful):
    """`in_float8` as a slot function, with checks of device and model."""

    def validate(self, state: DistState, plan: Plan) -> None:
        """Refuse a device without kernels for float8, and a model without layers for them."""
        torchao()
        if state.device.type == "cuda" and torch.version.cuda:
            capability = torch.cuda.get_device_capability(state.device)
            if capability < _FIRST_CAPABILITY:
                raise PlanError(
                    f"build: device must compute in float8, which begins with capability 8.9, got "
                    f"{state.device} of {'.'.join(map(str, capability))}; take with_amp('bf16')"
                )
        skip = self.keywords["skip"]
        if not fitting(plan.model, skip):
            beside = " beside those of skip" if skip else ""
            raise PlanError(
                f"build: with_amp('fp8') must find linear layers with in_features and out_features that "
                f"are multiples of {_MULTIPLE}, got none in {type(plan.model).__name__}{beside}; take "
                "with_amp('bf16')"
            )


def torchao() -> Any:
    """Import torchao's float8, which is an optional dependency."""
    try:
        import torchao.float8
    except ModuleNotFoundError as error:
        raise ExtraError(
            f"with_amp: {error.name} must be installed for precision='fp8'; "
            'in a clone of accel_fn: pip install ".[float8]"',
            name=error.name,
        ) from None
    return torchao.float8


def fitting(model: nn.Module, skip: Blocks) -> list[nn.Linear]:
    """Select the plain linear layers outside of `skip` whose sizes fit kernels for float8."""
    skipped = modules_in(model, skip, "with_amp(skip)")
    return [
        each
        for each in model.modules()
        if isinstance(each, nn.Linear)
        and each not in skipped
        and type(each).forward is nn.Linear.forward
        and each.in_features % _MULTIPLE == 0
        and each.out_features % _MULTIPLE == 0
    ]


def in_float8(state: DistState, plan: Plan, *, skip: Blocks) -> ContextFn:
    """Make, for one step function, the context in which linear layers compute in float8."""
    emulated = state.device.type != "cuda"
    # Make these objects once for all steps: for new objects, torch.compile would compile again.
    forwards: dict[nn.Module, Callable[..., Any]] = {
        layer: partial(_run, layer, _twin(layer, emulated)) for layer in fitting(plan.model, skip)
    }

    def within(state: DistState) -> AbstractContextManager[None]:
        return with_forwards(forwards)

    return within


def _twin(layer: nn.Linear, emulated: bool) -> nn.Module:
    """Make torchao's layer of the same shape, on the meta device; `_run` gives it `layer`'s parameters."""
    float8 = torchao()
    has_bias = layer.bias is not None
    plain = nn.Linear(layer.in_features, layer.out_features, has_bias, device="meta")
    config = float8.Float8LinearConfig(emulate=emulated, pad_inner_dim=True)
    twin: nn.Module = float8.convert_to_float8_training(plain, config=config)
    return twin


def _run(layer: nn.Linear, twin: nn.Module, inputs: Tensor) -> Tensor:
    """Run torchao's layer with the parameters of `layer`, in the dtype of autocast."""
    kind = inputs.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
    parameters = {
        name: value
        for name, value in (("weight", layer.weight), ("bias", layer.bias))
        if value is not None
    }
    outputs: Tensor = functional_call(twin, parameters, (inputs.to(dtype),))
    return outputs
