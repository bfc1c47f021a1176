"""explain: a plan told as the step that it will be, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel_fn.base.launch_options import FromLaunch
from accel_fn.base.state import DistState
from accel_fn.step.plan import Plan, describe
from accel_fn.transforms.fsdp.fsdp import Sharding
from accel_fn.transforms.local_sgd.local_gradients import Parting
from accel_fn.transforms.reproducible.reproducible import Slotting


def explain(plan: Plan, state: DistState) -> str:
    """Print, on the main rank, what one step of this plan will do, phase by phase.

    Args:
        plan: any plan; nothing is built.
        state: says how many ranks and which device.

    Returns:
        The text, on every rank.

    Cost: nothing is run.

    >>> import accel_fn as af
    >>> text = af.explain(af.clip(1.0)(af.Plan(loss_fn, model, optimizer)), af.DistState())
    one step on 1 rank, cpu
      split      the whole batch of the rank
      weigh      num_samples
      place      batches stay where they are
      forward    loss_fn(Linear, batch)
      backward   the mean over the global batch
      gradients  clip_norm(max_norm=1.0)
      update     SGD(lr=0.1), 2 parameter tensors, 5 numbers
    """
    text = tell(plan, state)
    if state.is_main:
        print(text)
    return text


def tell(plan: Plan, state: DistState) -> str:
    """The text of `explain`."""
    lines = [f"one step on {_ranks(state)}, {state.device}"]
    lines += [f"  {phase:<10} {text}" for phase, text in phases(plan, state).items()]
    return "\n".join(lines)


def phases(plan: Plan, state: DistState) -> dict[str, str]:
    """What one step does, by the names of its phases, in their order; idle ones are left out."""
    several = state.world_size > 1
    told = {
        "start": _listed(plan.starts),
        "model": _listed([*plan.move_model, *plan.compile_loss, *plan.compile_step]),
        "split": _split(plan),
        "weigh": describe(plan.weight_fn) + (f", summed over {_ranks(state)}" if several else ""),
        "place": _listed(plan.place_batch) or "batches stay where they are",
        "forward": _forward(plan),
        "backward": _backward(plan, several),
        "wrapped": _listed(plan.grad_fns),
        "verdicts": _verdicts(plan),
        "gradients": _listed(plan.gradients),
        "update": _update(plan),
        "after": _listed(plan.after),
        "stop": _stops(plan),
    }
    return {phase: text for phase, text in told.items() if text}


def _split(plan: Plan) -> str:
    slots = _listed([each for each in plan.own_parameters if isinstance(each, Slotting)])
    return (
        ", then ".join(filter(None, [slots, _listed(plan.split)])) or "the whole batch of the rank"
    )


def _verdicts(plan: Plan) -> str:
    said = " and ".join(map(describe, plan.verdicts))
    return f"an update, where {said} says so" if said else ""


def _stops(plan: Plan) -> str:
    said = " or ".join(map(describe, plan.stops))
    return f"after this step, where {said} says so on any rank" if said else ""


def _ranks(state: DistState) -> str:
    return f"{state.world_size} ranks" if state.world_size > 1 else "1 rank"


def _listed(functions: Sequence[Any]) -> str:
    return ", then ".join(map(_told, functions))


def _told(fn: Any) -> str:
    return f"{describe(fn)}, {fn.source}" if isinstance(fn, FromLaunch) else describe(fn)


def _forward(plan: Plan) -> str:
    call = f"{describe(plan.loss_fn)}({type(plan.model).__name__}, batch)"
    return f"{call} under {_listed(plan.contexts)}" if plan.contexts else call


def _backward(plan: Plan, several: bool) -> str:
    owner = _listed(plan.own_parameters)
    if not several and not any(map(_acts_alone, plan.own_parameters)):
        comma = "," if any(isinstance(each, FromLaunch) for each in plan.own_parameters) else ""
        idle = f"; {owner}{comma} has nothing to do" if owner else ""
        return "the mean over the global batch" + idle
    if any(isinstance(each, Parting) for each in plan.own_parameters):
        return f"the mean over the rank's own items, by {owner}"
    return f"the mean over the global batch, by {owner or 'nothing: build will refuse this'}"


def _acts_alone(owner: Any) -> bool:
    """Is there something to do for it in a world of one?"""
    is_sharding = isinstance(owner, Sharding)
    return isinstance(owner, Slotting) or (
        is_sharding and not owner.keywords.keys().isdisjoint(("param_dtype", "offload"))
    )


def _update(plan: Plan) -> str:
    optimizer, trained = plan.optimizer, plan.trained()
    given = [group.get("lr") for group in optimizer.param_groups]
    rates = sorted({float(rate) for rate in given if rate is not None})
    settings = f"(lr={', '.join(f'{rate:g}' for rate in rates)})" if rates else ""
    numbers = sum(p.numel() for p in trained)
    return f"{type(optimizer).__name__}{settings}, {len(trained)} parameter tensors, {numbers:,} numbers"
