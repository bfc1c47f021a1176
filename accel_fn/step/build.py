"""build: the one place that moves, wraps and compiles; it makes a step of a plan."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce
from typing import Any

from torch import nn

from accel_fn.base.rng import random_state, restore_random
from accel_fn.base.state import DistState, check_state, check_world
from accel_fn.comm import primitives
from accel_fn.comm.backends import current_world
from accel_fn.comm.collectives import all_or_none
from accel_fn.errors import ArgumentTypeError, check_flag, message
from accel_fn.step.checks.attributes import OptimizerAttributes
from accel_fn.step.checks.first_batches import FirstBatches
from accel_fn.step.frozen_models import freeze_models, share_frozen
from accel_fn.step.loss_module import LossModule
from accel_fn.step.observers import observers
from accel_fn.step.plan import Batch, Plan, SlotFunction, Stateful, slot_names
from accel_fn.step.plan_checks import check_parameters, check_plan, check_precision
from accel_fn.step.same_on_all_ranks import check_same_plan
from accel_fn.step.step import Stages, Step
from accel_fn.step.strategy import Strategy, check_strategy
from accel_fn.step.update import follow_parameters, follow_shards


def build(
    state: DistState, plan: Plan[Batch], *, check_loss: bool = True
) -> tuple[DistState, Step[Batch]]:
    """Make a step of a plan: the one place that moves, wraps and compiles.

    The model keeps its type, its forward, its hooks and its `state_dict` keys;
    its parameters may move to the device, and take rank 0's values. Building
    twice, also from one plan, gives two steps that work independently. `build` fixes which
    parameters are trained: a step refuses those that are added later, to the optimizer
    or by `requires_grad`; build again. Frozen models are placed, put into evaluation mode and kept from
    requiring a gradient; they take rank 0's values, too.

    On a mesh, ranks that differ in other axes than `dp` hold the same rows, so they must draw the same random
    numbers: each gets the states of Python's, NumPy's and torch's generators of the first of them.

    Args:
        state: of this rank, from `init()`, or `DistState()` for one process on the CPU.
        plan: what the step is made of; not changed.
        check_loss: where batches are cut over ranks or micro-batches, compare a few rows of batches
            1, 2, 10 and 100 with their parts: losses, gradients, metrics, and what the forward writes.
            The step raises if the plan's `reduction`, or the `shift` of `num_labels`, does not fit and
            another one does, if the forward writes trained parameters, or if a loss that calls
            collectives depends on how rows are dealt to ranks; it warns once of what else depends on the
            cut. `explain(step, state)` shows the result.

    Returns:
        The state with what transforms add to it (a loss scale), and the step.

    Raises:
        ValueError: on every rank, transforms that cannot be combined, an optimizer
            over other parameters than the model's, a frozen model without values or with a parameter of
            the model, nothing to train, a model on the CPU where the
            state has an accelerator and nothing places it there, or several ranks and no strategy
            that shares the step among them.
        RuntimeError: ranks build different plans.

    Cost: in a world of several, four small collectives, on a mesh two more for each other axis than `dp`, and
    what transforms do: those that train on several ranks broadcast the parameters; frozen models are
    broadcast. `check_loss` costs six
    or seven forwards and backwards of 8 to 15 samples, not compiled, in each of those four steps, up to twice
    as many where the program draws or writes, and three small collectives in a world of several; everything
    is put back. It takes no more memory than a step.

    >>> import accel_fn as af
    >>> plan = af.clip(1.0)(af.Plan(loss_fn, model, optimizer))
    >>> state, step = af.build(af.DistState(), plan)
    """
    check_state("build", state)
    check_world("build", state)
    check_flag("build", "check_loss", check_loss)
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(message("build", "plan", "be a Plan", type(plan).__name__))
    plan = all_or_none(partial(_validated, state, plan), state, "build")
    check_same_plan(state, plan)
    built, model = all_or_none(partial(_placed, state, plan), state, "build")
    share_frozen(built, plan)
    module: nn.Module = LossModule(plan.loss_fn, model, plan.terms, plan.frozen)
    for compile_loss in plan.compile_loss:
        module = compile_loss(built, module)
    make_strategy = plan.strategy[0] if plan.strategy else Strategy
    strategy = make_strategy(built, module, plan)
    check_strategy(strategy)
    plan = all_or_none(partial(with_stateful, plan, built), state, "build")
    _draw_alike(built)
    stages = Stages(plan, strategy)
    run = plan.compile_step[0](built, stages) if plan.compile_step else stages
    checks = FirstBatches(built, plan, strategy, check_loss=check_loss)
    before = [each.before_step for each in plan.after_update if hasattr(each, "before_step")]
    notes = {"attributes": OptimizerAttributes(plan)}
    step = Step(plan, strategy, stages, run, built, checks, before, notes)
    for each in observers([plan]):
        each.built(step)
    return built, step


def _draw_alike(state: DistState) -> None:
    """Give ranks that hold the same rows the generators of the first of them: a process has its own seed."""
    # Without a default group, ranks are simulated: threads, which share the generators.
    axes = state.axes if current_world() else ()
    for axis in axes:
        if axis.name != "dp" and axis.world_size > 1:
            own = random_state(state.device)
            first, *_ = primitives.exchange(own, state.along(axis.name), "build")
            restore_random(first, state.device)


def _validated(state: DistState, plan: Plan[Batch]) -> Plan[Batch]:
    """The plan, once every check that needs no other rank has passed."""
    for each in plan.entries():
        if isinstance(each, SlotFunction):
            plan = each.claim(plan)
    check_plan(state, plan)
    return plan


def _placed(state: DistState, plan: Plan) -> tuple[DistState, nn.Module]:
    """State and model where this rank begins. This may fail on one rank alone, out of memory for example."""
    state = reduce(lambda state, init_state: init_state(state), plan.init_state, state)
    if plan.init_state:
        check_precision(state, plan.model)
    model = plan.model
    for place in plan.place_model:
        model = place(state, model)
    placed = dict(plan.model.named_parameters())
    for shard in plan.shard_model:
        model = shard(state, model)
    if plan.place_model or plan.shard_model:
        for optimizer in plan.optimizers.values():
            follow_shards(optimizer, placed, plan.model)
            follow_parameters(optimizer)
        check_parameters(plan)
    freeze_models(state, plan)
    return state, model


def with_stateful(plan: Plan[Batch], state: DistState) -> Plan[Batch]:
    """The plan of one step: with a function of its own for each `Stateful`."""
    # State belongs to the step: a plan is data that may be built twice, and the two steps of a GAN
    # share one `DistState`.
    for name in slot_names():
        slot = list(getattr(plan, name))
        for place, each in enumerate(slot):
            if isinstance(each, Stateful):
                slot[place] = made = each(state, plan)
                if each.call:
                    made.call = each.call
                filled: dict[str, Any] = {name: tuple(slot)}
                plan = replace(plan, **filled)
    return plan
