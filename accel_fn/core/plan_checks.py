"""Checks of a plan before anything is moved or wrapped."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accel_fn.core import primitives
from accel_fn.core.dtensor import is_sharded
from accel_fn.core.empty import check_memory
from accel_fn.core.loss import check_frozen, tensors_of_frozen
from accel_fn.core.mesh_axes import mesh_name
from accel_fn.core.microbatches import in_microbatches
from accel_fn.core.parameters import check_hooks, shares_gradients
from accel_fn.core.plan import Plan, SlotFunction, describe, slot_names
from accel_fn.core.state import DistState, mesh_of
from accel_fn.core.zero import is_born_sharded, is_copied
from accel_fn.errors import PlanError, check_equal

_SINGLE = (
    "place_model",
    "place_frozen",
    "shard_model",
    "compile_loss",
    "compile_step",
    "strategy",
    "split",
)

_WITHOUT_MESH = ("local_gradients", "virtual_ranks", "collectives_in_apply")
"""Traits of transforms that support no mesh axis except `dp`."""


def check_plan(state: DistState, plan: Plan) -> None:
    """Refuse a plan that cannot make a step, as far as this rank can find out alone."""
    _check_slots(state, plan)
    _check_model(plan)
    check_parameters(plan)
    check_memory(state, plan)
    check_frozen(state, plan)
    _check_optimizers(plan)
    _check_world(state, plan)
    _check_frequencies(state, plan)
    _check_mesh(state, plan)
    _check_device(state, plan)
    if shares_gradients(state, plan):
        check_hooks("build", plan)
    for each in plan.entries():
        _validate(each, state, plan)


def _check_model(plan: Plan) -> None:
    """Refuse a model whose parameters DeepSpeed manages already, or that is cut into pipeline stages."""
    if is_born_sharded(plan.model):
        raise PlanError(
            "build: model must be made outside of deepspeed.zero.Init, got parameters that are in shards "
            "already; leave it out, since wrap_deepspeed(stage=3) shards them"
        )
    if any("_pp_stage" in vars(each) for each in plan.model.modules()):
        raise PlanError(
            "build: model must have all of its layers on every rank, got one that transformers has cut into "
            "stages; leave out DistributedConfig(pp_size=), and use wrap_fsdp or wrap_tp"
        )
    if is_copied(plan.model):
        raise PlanError(
            "build: model must be a new one after wrap_deepspeed, whose engine holds the parameters, got the "
            "same one; make the model again, and load a checkpoint"
        )


def _validate(each: Any, state: DistState, plan: Plan) -> None:
    """Call a slot function's `validate`, which may refuse the plan or the world."""
    if isinstance(each, SlotFunction):
        each.validate(state, plan)
        if not each.allows(state.world_size):
            raise PlanError(
                f"build: {describe(each)} must have another number of ranks, got {state.world_size}; "
                "leave it out, or start another number"
            )


def _check_slots(state: DistState, plan: Plan) -> None:
    for slot in _SINGLE:
        entries = getattr(plan, slot)
        if len(entries) > 1:
            for each in entries:
                # Validate the functions first: their own errors may be more precise than the one
                # below.
                _validate(each, state, plan)
            names = " and ".join(map(describe, entries))
            raise PlanError(
                f"build: plan must have at most one function in {slot}, got {names}; "
                f"{leave_out_one(entries)}"
            )
    contexts = plan.forward_contexts
    functions = [each.func if isinstance(each, partial) else each for each in contexts]
    if any(count > 1 for count in Counter(functions).values()):
        names = " and ".join(map(describe, contexts))
        raise PlanError(f"build: plan must enter each context once, got {names}; leave out one")


def leave_out_one(entries: Sequence[Any]) -> str:
    """Return the repair of an error: to leave out one of these functions, by its transform's name."""
    calls = [each.call for each in entries if isinstance(each, SlotFunction) and each.call]
    names = [*dict.fromkeys(call.partition("(")[0] for call in calls)]
    return f"leave out one of {' and '.join(names)}" if len(names) > 1 else "leave out one"


def check_parameters(plan: Plan) -> None:
    """Refuse lazy parameters, a model or optimizer with nothing to train, and foreign parameters."""
    lazy = next((name for name, p in plan.model.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise PlanError(
            f"build: model must have parameters with shapes, got {lazy} without; call the model once"
        )
    if not any(p.requires_grad for p in plan.model.parameters()):
        raise PlanError(
            f"build: model must have parameters that require a gradient, "
            f"got a {type(plan.model).__name__} with none"
        )
    known = {id(p) for p in plan.model.parameters()}
    groups = [group for each in plan.optimizers.values() for group in each.param_groups]
    given = [p for group in groups for p in group["params"]]
    foreign = [list(p.shape) for p in given if id(p) not in known]
    if foreign:
        raise PlanError(
            f"build: optimizer must hold parameters of the model alone, got {len(foreign)} others, of "
            f"shapes {foreign[:3]}; join the modules in one nn.ModuleDict, or make the optimizer "
            "after what replaces parameters"
        )
    if not any(p.requires_grad for p in given):
        raise PlanError(
            "build: optimizer must hold a parameter that requires a gradient, got none; unfreeze one"
        )


def _check_optimizers(plan: Plan) -> None:
    holders: dict[int, str] = {}
    for name, optimizer in plan.optimizers.items():
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            other = holders.setdefault(id(parameter), name)
            if other != name:
                named = plan.model.named_parameters()
                which = next((n for n, p in named if p is parameter), "one")
                raise PlanError(
                    "build: optimizers must hold different parameters, or those would be updated "
                    f"twice, got {which} in {other!r} and {name!r}; give it to one of them"
                )
    for each in plan.optimizers.values():
        closure = inspect.signature(type(each).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise PlanError(
                f"build: optimizer must update from gradients alone, got {type(each).__name__}, "
                "whose step evaluates the loss again; use another, or step.grads in a loop of your own"
            )


def _check_world(state: DistState, plan: Plan) -> None:
    if state.world_size == 1:
        return
    named = plan.model.named_parameters()
    sharded = next((name for name, each in named if is_sharded(each)), None)
    if sharded is not None and not plan.having("shards"):
        raise PlanError(
            f"build: model must hold its parameters whole, got {sharded}, a DTensor; add wrap_tp(), which "
            "takes a model after parallelize_module as it is; after fully_shard, give the model as it was "
            "before, and wrap_fsdp()"
        )
    num_replicas = state.data.world_size if plan.shard_model else state.world_size
    if not plan.strategy and num_replicas > 1:
        for each in plan.shard_model:
            # Validate the functions first: an error of their own may be more precise than the one
            # below.
            _validate(each, state, plan)
        raise PlanError(
            f"build: plan must average gradients over the {num_replicas} ranks, got nothing that "
            "does; add wrap_ddp()"
        )
    if not plan.having("local_gradients"):
        check_row_norms(plan.model)


def _check_mesh(state: DistState, plan: Plan) -> None:
    """If ranks are along other axes than `dp`, refuse transforms that do not support such a mesh."""
    if state.data.world_size == state.world_size:
        return
    for each in (fn for trait in _WITHOUT_MESH for fn in plan.having(trait)):
        raise PlanError(
            f"build: {describe(each)} must have a mesh of dp alone, got "
            f"{mesh_name(mesh_of(state))}; use wrap_ddp, or leave out mesh"
        )


def _check_device(state: DistState, plan: Plan) -> None:
    """Refuse a plan that would train the model on the host although the state has an accelerator."""
    if state.device.type == "cpu" or plan.place_model or plan.shard_model or plan.having("shards"):
        return
    if all(each.is_cpu for each in plan.model.parameters()):
        raise PlanError(
            f"build: model must be on {state.device}, the device of the state, got all parameters on the "
            'CPU; add place(), or train there with init(device="cpu")'
        )


def check_row_norms(model: nn.Module) -> None:
    """Refuse embeddings with `max_norm`: each rank would write to the rows of its own samples."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise PlanError(
                "build: model must not write to parameters in its forward, which on each rank is that of "
                f"other samples, got {name or 'the model'}, of max_norm={module.max_norm}; leave it out, "
                "and let torch.renorm bound the rows that were looked up"
            )


def _check_frequencies(state: DistState, plan: Plan) -> None:
    """Refuse embeddings with `scale_grad_by_freq` if ranks or micro-batches share a batch.

    Each part of the batch would scale gradients by how often an index occurs in this part, and not
    in the batch.
    """
    is_cut = state.world_size > 1 or in_microbatches(plan)
    for name, module in plan.model.named_modules() if is_cut else ():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
            raise PlanError(
                "build: model must not scale gradients by how often a batch has a row, which each rank and "
                f"micro-batch counts in its own samples, got {name or 'the model'}, of "
                "scale_grad_by_freq=True; leave it out"
            )


def check_precision(state: DistState, model: nn.Module) -> None:
    """Refuse a loss scale for a model that trains parameters in float16."""
    halves = [
        name for name, p in model.named_parameters() if p.dtype == torch.float16 and p.requires_grad
    ]
    if state.scaler is not None and halves:
        raise PlanError(
            f'build: with_amp("fp16") must have float32 parameters to update, got float16 {halves[0]}; '
            "use model.float(), autocast makes the float16 copies"
        )


def check_same_plan(state: DistState, plan: Plan) -> None:
    """Raise on every rank if ranks build different steps: their replicas would diverge."""
    every = primitives.exchange(_summary(plan), state, "build")
    for entries in zip(*every, strict=False):
        check_equal(entries, "build: plan must be the same on every rank")
    check_equal(
        [f"{len(each)} entries" for each in every], "build: model must be the same on every rank"
    )


def _summary(plan: Plan) -> list[str]:
    """List the facts that ranks must agree on: slots, settings, parameters. `split` may differ."""
    slots = [
        f"{name}={list(map(_identity, getattr(plan, name)))}"
        for name in slot_names()
        if name != "split"
    ]
    optimizers = [
        f"{name}={type(optimizer).__name__} {[*map(_settings, optimizer.param_groups)]}"
        for name, optimizer in plan.optimizers.items()
    ]
    parameters = [
        # Rank 0 sends the tensors that have values, one by one. So ranks must agree on which
        # tensors are empty.
        f"{name} {list(p.shape)} {p.dtype} requires_grad={p.requires_grad}{' empty' * p.is_meta}"
        for name, p in plan.model.named_parameters()
    ]
    frozen = [
        f"frozen {name} {list(each.shape)} {each.dtype}" for name, each in tensors_of_frozen(plan)
    ]
    buffers = [name for name, each in plan.model.named_buffers() if each.is_meta]
    loss = f"reduction={plan.reduction} terms={list(plan.terms)}"
    empty = f"buffers without values={buffers}"
    return [*slots, loss, empty, *optimizers, *parameters, *frozen]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group that are plain values."""
    return {
        name: value for name, value in group.items() if isinstance(value, int | float | str | tuple)
    }


def _identity(fn: Any) -> str:
    """Return a function's name, with arguments if it is a function of accel_fn.

    The arguments of a user's function may differ between ranks.
    """
    inner = fn.func if isinstance(fn, partial) else fn
    is_ours = str(getattr(inner, "__module__", "")).startswith("accel_fn.")
    return describe(fn) if is_ours else describe(inner)
