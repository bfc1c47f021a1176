"""explain: describe the step that a plan will make, phase by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from accel_fn.checks.first_batches import FirstBatches
from accel_fn.checks.sequences import SequenceCheck
from accel_fn.core.dtensor import is_sharded, local
from accel_fn.core.empty import is_unfilled, tensors_in
from accel_fn.core.loop import describe_backward
from accel_fn.core.loss import takes_frozen
from accel_fn.core.mesh_axes import mesh_name
from accel_fn.core.plan import Plan, SlotFunction, describe, describe_with_source, trained_by
from accel_fn.core.state import DistState, check_state, mesh_of
from accel_fn.core.step import Step
from accel_fn.errors import ArgumentTypeError, message

_NO_SETTINGS = ("params", "param_names", "initial_lr")
"""Entries of an optimizer's groups that are not settings chosen by the user."""


def explain(plan: Plan | Step, state: DistState) -> str:
    """Describe what one step of this plan will do, phase by phase.

    Args:
        plan: a plan, from which nothing is built; or a step, for which a last line shows what the
            checks of its first batches have found about the loss.
        state: gives the number of ranks, and the device.

    Returns:
        A text of several lines, to be printed on the main rank.

    Raises:
        TypeError: `plan` is neither a plan nor a step, or `state` is not a `DistState`.
        ValueError: `wrap_fsdp(replicate=)` does not divide the number of ranks, as in `build`.

    Cost: nothing is run.

    >>> import accel_fn as af
    >>> plan = af.clip(1.0)(af.Plan(loss_fn, model, optimizer))
    >>> print(af.explain(plan, af.DistState()))
    one step on 1 rank, cpu
      split      the whole batch of the rank
      weigh      count_samples
      place      batches stay where they are
      forward    loss_fn(Linear, batch)
      backward   the mean over the global batch
      gradients  clip(1.0)
      update     SGD(lr=0.1), 2 parameter tensors, 5 numbers
    """
    check_state("explain", state)
    if not isinstance(plan, Plan | Step):
        raise ArgumentTypeError(
            message("explain", "plan", "be a Plan or a Step", type(plan).__name__)
        )
    described = phases(plan.plan if isinstance(plan, Step) else plan, state)
    if isinstance(plan, Step):
        described["backward"] = describe_backward(state, plan.plan)
        for each in plan.observers.every:
            if isinstance(each, FirstBatches):
                described["check"] = f"the loss {each.comparison.verdict}"
            if isinstance(each, SequenceCheck):
                described["cut"] = f"the loss of blocks of sequences {each.text}"
        unused = plan.strategy.reached.unused
        if unused:
            described["unused"] = f"{', '.join(unused)}, which wrap_ddp refuses on several ranks"
    lines = [f"  {phase:<10} {text}" for phase, text in described.items()]
    mesh = f" ({mesh_name(mesh_of(state))})" if state.axes else ""
    return "\n".join([f"one step on {_ranks(state.world_size)}{mesh}, {state.device}", *lines])


def phases(plan: Plan, state: DistState) -> dict[str, str]:
    """Describe the work of one step, by phase name; leave out phases that do nothing."""
    model = [*plan.place_model, *plan.shard_model, *plan.compile_loss, *plan.compile_step]
    accepted = " and ".join(map(describe, plan.accept))
    stops = " or ".join(map(describe, plan.should_stop))
    texts = {
        "start": _listed(plan.init_state),
        "model": _listed(model),
        "parts": _parts(plan, state),
        "frozen": _frozen(plan),
        "data": _data(state),
        "split": _listed([*plan.having("virtual_ranks"), *plan.split])
        or "the whole batch of the rank",
        "weigh": describe(plan.weight_fn) + _summed(state),
        "place": _listed(plan.place_batch) or "batches stay where they are",
        "forward": _forward(plan),
        "backward": describe_backward(state, plan),
        "wrapped": _listed(plan.wrap_grad_fn),
        "accept": f"the update, if {accepted} accepts it" if accepted else "",
        "gradients": _listed(plan.gradients),
        "empty": _empty(plan),
        "update": _update(plan),
        "after": _listed(plan.after_update),
        "stop": f"after this step, if {stops} requests it on any rank" if stops else "",
        "watched": _listed(plan.observers),
    }
    return {phase: text for phase, text in texts.items() if text}


def _parts(plan: Plan, state: DistState) -> str:
    """Describe into how many parts ranks divide model, state and sequences; "" if none."""
    # FSDP shards a split model along dp only, and any other model over all ranks.
    size = state.data.world_size if plan.shard_model else state.world_size
    names: dict[int, list[str]] = {}
    for slot in plan.strategy:
        for name, count in slot.num_parts(size).items() if isinstance(slot, SlotFunction) else ():
            names.setdefault(count, []).append(name)
    texts = [f"{', '.join(held)} in {count} parts" for count, held in names.items() if count > 1]
    divided = [(each, "layers with a style in {} parts") for each in plan.shard_model]
    divided += [(each, "sequences in {} blocks") for each in plan.having("cuts_sequences")]
    for each, text in divided:
        axis = getattr(each, "keywords", {}).get("axis", "")
        count = mesh_of(state).get(axis, 1)
        if count > 1:
            texts.append(f"{text.format(count)} along {axis}")
    return "; ".join(texts)


def _data(state: DistState) -> str:
    """Describe which ranks share a batch; return "" if all of them do."""
    others = [axis for axis, size in mesh_of(state).items() if size > 1 and axis != "dp"]
    if not others:
        return ""
    shared = f"a part of each batch for {_ranks(state.data.world_size)} along dp"
    return f"{shared}, the same rows along {', '.join(others)}"


def _summed(state: DistState) -> str:
    size = state.data.world_size
    along = " along dp" if state.axes else ""
    return f", summed over {_ranks(size)}{along}" if size > 1 else ""


def _ranks(count: int) -> str:
    return f"{count} ranks" if count > 1 else "1 rank"


def _listed(functions: Sequence[Any]) -> str:
    return ", then ".join(dict.fromkeys(map(describe_with_source, functions)))


def _forward(plan: Plan) -> str:
    gets_frozen = plan.frozen and takes_frozen(plan.loss_fn)
    given = f"{type(plan.model).__name__}, batch{', frozen' if gets_frozen else ''}"
    call = f"{describe(plan.loss_fn)}({given})"
    return f"{call} under {_listed(plan.forward_contexts)}" if plan.forward_contexts else call


def _frozen(plan: Plan) -> str:
    """Describe the frozen models, their sizes and dtypes, and the functions that place them."""
    texts = []
    for name, model in plan.frozen.items():
        parameters = [*model.parameters()]
        dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in parameters})
        numbers = sum(each.numel() for each in parameters)
        kind = ", ".join([type(model).__name__, f"{numbers:,} numbers", *dtypes])
        texts.append(f"{name}: {kind}")
    models, placed = "; ".join(texts), _listed(plan.place_frozen)
    return f"{models}, by {placed}" if models and placed else models


def _empty(plan: Plan) -> str:
    """Describe the tensors that have no values yet."""
    every = [each for _, each in tensors_in(plan.model)]
    shapes = sum(each.is_meta for each in every)
    if shapes:
        return f"{shapes} tensors without memory, which build gives and load_model fills"
    unfilled = sum(map(is_unfilled, every))
    return f"{unfilled} tensors without values, which load_model fills" if unfilled else ""


def _update(plan: Plan) -> str:
    if isinstance(plan.optimizer, Optimizer):
        return _optimizer(plan.optimizer)
    return "; ".join(f"{name}: {_optimizer(each)}" for name, each in plan.optimizers.items())


def _optimizer(optimizer: Optimizer) -> str:
    trained = trained_by(optimizer)
    given = [group.get("lr") for group in optimizer.param_groups]
    rates = sorted({float(rate) for rate in given if rate is not None})
    settings = f"(lr={', '.join(f'{rate:g}' for rate in rates)})" if rates else ""
    # In place of a sharded parameter, DeepSpeed leaves an empty tensor, whose `ds_numel` is the
    # parameter's number of elements.
    numbers = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
    own = sum(getattr(p, "ds_tensor", local(p)).numel() for p in trained)
    is_shared = any(is_sharded(p) or hasattr(p, "ds_tensor") for p in trained)
    here = f" ({own:,} on this rank)" if is_shared else ""
    return (
        f"{type(optimizer).__name__}{settings}, {len(trained)} parameter tensors, {numbers:,} numbers{here}"
        f"{_groups(optimizer)}"
    )


def _groups(optimizer: Optimizer) -> str:
    """List the settings that differ between groups, with the number of trained tensors of each."""
    groups = [
        {name: _setting(value) for name, value in group.items() if name not in _NO_SETTINGS}
        for group in optimizer.param_groups
    ]
    differing = [name for name in groups[0] if len({group.get(name) for group in groups}) > 1]
    if not differing:
        return ""
    counts: Counter[str] = Counter()
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        text = " and ".join(f"{name} {settings.get(name)}" for name in differing)
        counts[text] += sum(p.requires_grad for p in group["params"])
    texts = (f"{text}: {count} tensor{'s' * (count != 1)}" for text, count in counts.items())
    return f" ({', '.join(texts)})"


def _setting(value: Any) -> str:
    is_number = isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)
    return f"{float(value):g}" if is_number else str(value)
