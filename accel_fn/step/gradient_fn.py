"""The gradient function of a step: which backward a plan and its module ask for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn

from accel_fn.base.state import DistState
from accel_fn.step.backward import Backward, cloned
from accel_fn.step.grads import Grads
from accel_fn.step.plan import GradFn, Plan, Report
from accel_fn.step.trained_parameters import Settled
from accel_fn.transforms.accumulate.retry_on_oom import Halving, Retrying, agree
from accel_fn.transforms.ddp.bucket_scalars import Carrier
from accel_fn.transforms.fsdp.sharded_loss import Sharded
from accel_fn.transforms.reproducible.virtual_ranks import SlotBackward, Slotted


def gradient_fn(state: DistState, plan: Plan, module: nn.Module) -> GradFn:
    """A backward of whole batches, inside what the plan's gradient functions make of it."""
    trainable = (
        module.trainable()
        if isinstance(module, Sharded)
        else [p for p in module.parameters() if p.requires_grad]
    )
    inner = getattr(module, "module", None)
    halving = next((each for each in plan.split if isinstance(each, Halving)), None)
    fits = halving is not None and state.world_size > 1
    way = module.count_collectives() if fits and isinstance(module, Sharded) else None
    kind = SlotBackward if isinstance(module, Slotted) else Backward
    backward = kind(
        plan,
        module,
        trainable,
        plan.trained(),
        Settled.of(plan),
        inner if isinstance(inner, Carrier) else None,
        getattr(module, "no_sync", nullcontext),
        agree if fits and way is None else None,
        way,
    )
    computing: GradFn = backward if halving is None else Retrying(backward, halving)
    if not plan.grad_fns:
        return computing

    def kept(state: DistState, batch: Any) -> tuple[DistState, Grads, Report]:
        state, grads, report = computing(state, batch)
        return state, cloned(state, grads), report

    grad_fn: GradFn = kept
    for wrap in plan.grad_fns:
        grad_fn = wrap(grad_fn)
    return grad_fn
