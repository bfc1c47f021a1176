"""build: the one place that moves, wraps and compiles; it makes a step of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any
from weakref import proxy

from torch import nn

from accel_fn.base.rng import random_state, restore_random
from accel_fn.base.state import DistState, check_state, check_world
from accel_fn.comm import primitives
from accel_fn.comm.backends import current_world
from accel_fn.comm.collectives import all_or_none
from accel_fn.errors import ArgumentTypeError, message
from accel_fn.step.frozen_models import freeze_models, share_frozen
from accel_fn.step.loop import Strategy, check_strategy
from accel_fn.step.loss_module import LossModule
from accel_fn.step.observers import Observer, ObserverFn, Observers
from accel_fn.step.plan import Batch, Plan, SlotFunction, Stateful, slot_names
from accel_fn.step.plan_checks import check_parameters, check_plan, check_precision
from accel_fn.step.same_on_all_ranks import check_same_plan
from accel_fn.step.step import Stages, Step
from accel_fn.step.update import follow_parameters, follow_shards
from accel_fn.step.watched_steps import WatchedSteps


def build(
    plan: Plan[Batch], state: DistState, observers: Sequence[ObserverFn] = ()
) -> tuple[DistState, Step[Batch]]:
    """Make a step of a plan, watched by these observers and the plan's.

    `accel_fn.checkpoint.build.build` adds checks, and can take over an earlier step.
    """
    check_state("build", state)
    check_world("build", state)
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
    plan, watching = all_or_none(
        partial(_with_state, plan, strategy, built, observers), state, "build"
    )
    _draw_alike(built)
    stages = Stages(plan, strategy)
    run = plan.compile_step[0](built, stages) if plan.compile_step else stages
    strategy.observers = proxy(
        watching
    )  # an observer may hold the strategy: a cycle would keep both
    before = [each.before_step for each in plan.after_update if hasattr(each, "before_step")]
    return built, Step(plan, strategy, stages, run, built, watching, before)


def _with_state(
    plan: Plan[Batch], strategy: Strategy, state: DistState, observers: Sequence[ObserverFn]
) -> tuple[Plan[Batch], Observers]:
    """What has state of its own in each step: slot functions, and observers."""
    plan = with_stateful(plan, state)
    every = [make(plan, strategy, state) for make in (*plan.observers, *observers)]
    for each in every:
        if not isinstance(each, Observer):
            rule = "return an Observer"
            raise ArgumentTypeError(message("build", "observers", rule, type(each).__name__))
    if state.watchdog is not None:
        every.append(WatchedSteps(state.watchdog))
    return plan, Observers(every)


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
