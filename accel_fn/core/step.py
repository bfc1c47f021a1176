"""Step, its stages, and `build`, the only function that moves, wraps and compiles models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, Generic
from weakref import proxy

from torch import Tensor, nn

from accel_fn.core import primitives
from accel_fn.core.collectives import all_or_none
from accel_fn.core.empty import FilledCheck, check_filled, give_memory, is_empty
from accel_fn.core.grads import Grads
from accel_fn.core.loop import Strategy, check_strategy, forward
from accel_fn.core.loss import LossModule, freeze_models, share_frozen
from accel_fn.core.observers import Observer, ObserverFn, Observers, WatchedSteps
from accel_fn.core.plan import (
    Batch,
    GradFn,
    Plan,
    SlotFunction,
    Stateful,
    StepFn,
    describe,
    slot_names,
)
from accel_fn.core.plan_checks import check_parameters, check_plan, check_precision, check_same_plan
from accel_fn.core.primitives import check_joined, current_world
from accel_fn.core.report import Report
from accel_fn.core.restored import random_state, restore_random
from accel_fn.core.state import DistState, check_state, check_world
from accel_fn.core.update import follow_parameters, follow_shards
from accel_fn.errors import (
    ArgumentError,
    ArgumentTypeError,
    PlanError,
    StateError,
    check_flag,
    message,
)


class Stages:
    """The stages of a step: compute gradients, prepare the update, apply it.

    An error in the first two stages leaves parameters, optimizers and stateful functions unchanged.
    A `compile_step` function may replace `__call__`.
    """

    def __init__(self, plan: Plan, strategy: Strategy) -> None:
        self.plan = plan
        self.strategy = strategy
        self.grad_fn, self.keeps_gradients = _wrapped(plan, strategy)

    def __call__(self, state: DistState, batch: Any) -> tuple[DistState, Report]:
        """Run all of a step except `after_update`."""
        plan, strategy = self.plan, self.strategy
        state, grads, report = self.grad_fn(state, batch)
        prepared = strategy.prepare(plan, state, grads, report)
        if strategy.observers.of_updates:
            strategy.observers.on_update(state, prepared.grads, report)
        return strategy.apply(plan, state, prepared)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Step(Generic[Batch]):
    """One training step: `step(state, batch) -> (state, report)`. `build` makes it.

    `step(state, batch)` is `grads` and `update` in turn. The state is a value:
    keep the new one. Model and optimizer are the user's objects and change in
    place, as in any loop.

    Attributes:
        plan: the plan that the step was built from, with its model and optimizer.

    >>> import accel_fn as af
    >>> state, step = af.build(af.Plan(loss_fn, model, optimizer), af.DistState())
    >>> state, report = step(state, batch)
    >>> state.step, report.weight, bool(report.applied)
    (1, 8, True)
    """

    plan: Plan[Batch]
    strategy: Strategy
    stages: Stages
    _run: StepFn
    """`Stages.__call__`, or the function that `compile_step` made to replace it."""
    _built_with: DistState
    observers: Observers
    """The checks, loggers and other observers of the step."""
    _before: Sequence[Callable[[DistState, Any], None]]
    """The `before_step` methods of `after_update` functions. They are called as a step begins, with
    its state and batch."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Facts about this run. "newest" is the state that the last step began with. "empty" is there
    while the model may lack values. `save` and `load` store facts of their own."""

    def __call__(
        self, state: DistState, batch: Batch, *, advance: bool = True
    ) -> tuple[DistState, Report]:
        """Consume one batch: this rank's part of it.

        Args:
            state: from `build` or the last step.
            batch: a tree of tensors, each [num_samples, ...], and of `samples`; may be empty or None, or
                weigh nothing.
            advance: False if another step on the same batch follows, as in a GAN: `state.step`
                stays, and `state.call` counts one more. Update, schedules and averages count as in
                any step.

        Returns:
            The state with `step` one further and `call` 0, and the report.

        Raises:
            TypeError: `advance` is not True or False.
            ValueError: the state is another world's; the batch cannot be counted, has one row in a
                micro-batch under a BatchNorm that trains, or differs on ranks that differ in other
                axes than `dp`; the loss cannot be trained on, or is not a mean although the plan's
                `reduction` is "mean".

        Warns:
            UserWarning: once, on the main rank, if: the model is in evaluation mode; all ranks have
                the same batch; the batch is None ten times; the state is the same one a third time;
                a loader begins again after `load`; BatchNorm trains on a part of the batch; the
                loss reaches tensors outside of the model; dimension 0 of a loader's batch, which
                the default weight counts, is not its samples; a frozen model has changed or is in
                training mode; on one process, the loss misses parameters that `wrap_ddp` waits for
                on several; the loss, its gradient, a metric, or a write of the forward depends on
                the cut of a batch.

        Cost: the sum of its transforms' costs. In steps 1, 2, 10 and 100: a walk over the graph of
        the loss, two small collectives in a world of several, the cost of `check_loss` (see
        `build`), and, if ranks hold the same rows, a read of the batch and two more collectives. In
        the first step, also a read of the batch and two more. Other steps add no host
        synchronisation, with two exceptions: a wait for the weights before the forward if a
        BatchNorm trains on rows of a rank, and one in the first update of several ranks, which
        compares the input of the optimizer.
        """
        self._check_state(state)
        if advance is not True:
            check_flag("step", "advance", advance)
        before, observers = state, self.observers
        for before_step in self._before:
            before_step(state, batch)
        given = observers.before(state, batch)
        try:
            state, report = self._run(state, given)
            self.notes["newest"] = before
            if not advance:
                state = _still(before, state)
            for after_update in self.plan.after_update:
                state = after_update(state, report)
        except BaseException as error:
            observers.failed(before, error)
            raise
        if observers.due:
            observers.after(state, batch, report)
        return state, report

    def forward(self, state: DistState, batch: Batch) -> Tensor:
        """Compute the mean loss over the global batch, as the step does, without gradients.

        It runs with the step's placement, micro-batches and autocast, in the current mode of the
        model and its optimizers. If that matters, first call `model.eval()`, and `optimizer.eval()`
        of a schedule-free optimizer. `evaluate` switches both. In evaluation mode (`model.training`
        is False on every rank), all ranks use the buffers of the main rank, as in `evaluate`.

        Args:
            state: as for the step.
            batch: as for the step.

        Returns:
            [], float32 or float64 as in the report, on the device; equal on every rank. 0 if
            nothing counts.

        Raises:
            ValueError: as for the step; in evaluation mode, also between two averages of
                `local_sgd`.
            RuntimeError: in evaluation mode, the buffers of ranks differ in shape.

        Cost: two small collectives in a world of several, and the gathers of `wrap_fsdp`. In
        evaluation mode with buffers in the `state_dict`, also a copy of the buffers, two
        collectives and one broadcast.
        """
        self._check_state(state)
        self.check_filled("step.forward")
        plan, strategy = self.plan, self.strategy
        if plan.model.training:
            return forward(strategy, plan, state, batch)
        with strategy.evaluating(plan, state, "step.forward"):
            return forward(strategy, plan, state, batch)

    def grads(self, state: DistState, batch: Batch) -> tuple[DistState, Grads, Report]:
        """Compute the gradients of the global batch, equal on all ranks, without an update.

        Args:
            state: as for the step.
            batch: as for the step.

        Returns:
            The state, the gradients with their factor open, and a report
            without `applied`.

        Cost: that of the step up to the optimizer. In a world of several, or with CUDA graphs, also
        one copy of the gradients, since the next backward reuses their memory.
        """
        self._check_state(state)
        self._check_gradients_are_left("step.grads")
        before = state
        given = self.observers.before(state, batch)
        try:
            state, grads, report = self.stages.grad_fn(state, given)
        except BaseException as error:
            self.observers.failed(before, error)
            raise
        if self.observers.due:
            self.observers.after(state, batch, report)
        if not self.stages.keeps_gradients:
            grads = _cloned(state, self.plan, grads)
        return state, grads, report

    def update(
        self, state: DistState, grads: Grads, report: Report, *, advance: bool = True
    ) -> tuple[DistState, Report]:
        """Transform the gradients, run the optimizer and `after_update`; count one batch.

        Args:
            state: the state from `grads`, or a later one.
            grads: used up: their tensors may be overwritten.
            report: the report of these gradients; `grad_norm` and `applied` are filled in.
            advance: as for the step.

        Returns:
            The state with `step` one further and `call` 0, and the report.

        Raises:
            TypeError: `advance` is not True or False.
            ValueError: the state is another world's; or gradients and report do not come from a
                step of this model.

        Cost: one read of the gradients with float16 or `clip`, and the optimizer's.
        """
        self._check_state(state)
        if advance is not True:
            check_flag("step.update", "advance", advance)
        self._check_gradients_are_left("step.update")
        self._check_outcome(grads, report)
        before = state
        for before_step in self._before:
            before_step(state, None)
        self.strategy.reset()
        try:
            prepared = self.strategy.prepare(self.plan, state, grads, report)
            self.observers.on_update(state, prepared.grads, report)
            state, report = self.strategy.apply(self.plan, state, prepared)
            if not advance:
                state = _still(before, state)
            for after_update in self.plan.after_update:
                state = after_update(state, report)
        except BaseException as error:
            self.observers.failed(before, error)
            raise
        if self.observers.due:
            self.observers.after(state, None, report)
        return state, report

    def _check_state(self, state: DistState) -> None:
        built = self._built_with
        if type(state) is not DistState:
            check_state("step", state)
        if not _is_of_one_world(state, built):
            raise StateError(
                f"step: state must be of the world it was built in, got {state}, built with {built}"
            )
        if built.scaler is not None and state.scaler is None:
            raise StateError(
                "step: state must carry a loss scale, got none; use the state that build returned"
            )
        if state.watchdog is not None:
            check_joined(state, "step")

    def check_follows(self, state: DistState) -> None:
        """Refuse a state of another world or an earlier step, with which no step can follow this one."""
        built, newest = self._built_with, self.notes.get("newest")
        if not _is_of_one_world(state, built):
            raise StateError(
                f"build: after must be a step of the world of the state, got {built} for {state}; "
                'save, and load with match="names"'
            )
        lost = newest is not None and newest.scaler is not None and state.scaler is None
        if newest is not None and (state is newest or state.step < newest.step or lost):
            raise StateError(
                "build: state must be the one that the last step returned, got an earlier one, of step "
                f"{state.step}; write state, step = build(plan, state, after=step)"
            )

    def check_filled(self, function: str) -> None:
        """Refuse, on all ranks, a model that `empty` made and that still lacks values."""
        if "empty" in self.notes:
            check_filled(self.plan, self._built_with, function)
            del self.notes["empty"]

    def _check_gradients_are_left(self, function: str) -> None:
        """Refuse a strategy whose engine keeps the gradients."""
        if not self.strategy.leaves_gradients:
            name = describe(self.plan.strategy[0]).partition("(")[0]
            raise PlanError(
                f"{function}: step must be of a plan without {name}, whose engine keeps gradients and "
                "parameters, got one with it; call the step, or use wrap_fsdp"
            )

    def _check_outcome(self, grads: Grads, report: Report) -> None:
        """Refuse values that `step.grads` did not return."""
        for name, value, kind in (("grads", grads, Grads), ("report", report, Report)):
            if not isinstance(value, kind):
                rule, got = f"be a {kind.__name__}, as step.grads gives it", type(value).__name__
                raise ArgumentTypeError(message("step.update", name, rule, got))
        trained = self.plan.trained()
        if len(grads.tensors) != len(trained):
            rule = f"hold one tensor, or None, for each of {len(trained)} trained parameters"
            raise ArgumentError(message("step.update", "grads", rule, len(grads.tensors)))

    def __repr__(self) -> str:
        return f"Step({self.plan!r})"


def _is_of_one_world(state: DistState, other: DistState) -> bool:
    return (
        state.group is other.group
        and state.rank == other.rank
        and state.world_size == other.world_size
        and state.device == other.device
    )


def _still(before: DistState, after: DistState) -> DistState:
    """Return the state after a step with `advance=False`: the run stays at the same batch."""
    return replace(
        after,
        step=before.step,
        call=before.call + 1,
        samples=before.samples,
        items=before.items,
    )


def _wrapped(plan: Plan, strategy: Strategy) -> tuple[GradFn, bool]:
    """Wrap `Strategy.gradients` in `wrap_grad_fn`; also return whether the result clones gradients itself."""
    grad_fn: GradFn = partial(strategy.gradients, plan)
    retrying = [each for each in plan.wrap_grad_fn if "retries" in getattr(each, "traits", ())]
    others = [each for each in plan.wrap_grad_fn if each not in retrying]
    for wrap in retrying:
        # Apply functions that retry first, inside of `_kept`: they run the same batch again and
        # keep no gradients, so they need no clones.
        grad_fn = wrap(grad_fn)
    kept: GradFn = partial(_kept, plan, grad_fn)
    wrapped = kept
    for wrap in others:
        wrapped = wrap(wrapped)
    return (grad_fn, False) if wrapped is kept else (wrapped, True)


def _kept(
    plan: Plan, grad_fn: GradFn, state: DistState, batch: Any
) -> tuple[DistState, Grads, Report]:
    state, grads, report = grad_fn(state, batch)
    return state, _cloned(state, plan, grads), report


def _cloned(state: DistState, plan: Plan, grads: Grads) -> Grads:
    """Clone gradients that a later backward overwrites, as in DDP's buckets and in CUDA graphs."""
    if state.world_size == 1 and not plan.having("cuda_graphs"):
        return grads
    return replace(grads, tensors=tuple([None if t is None else t.clone() for t in grads.tensors]))


def build(
    plan: Plan[Batch], state: DistState, observers: Sequence[ObserverFn] = ()
) -> tuple[DistState, Step[Batch]]:
    """Make a step of a plan, with these observers and the plan's.

    `accel_fn.checkpoint.build.build` adds checks, and can continue from an earlier step.
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
    # An observer may hold the strategy. Without the proxy, the reference cycle would keep both
    # alive.
    strategy.observers = proxy(watching)
    before = [each.before_step for each in plan.after_update if hasattr(each, "before_step")]
    step = Step(plan, strategy, stages, run, built, watching, before)
    if is_empty(plan.model):
        step.notes["empty"] = True
    return built, step


def _with_state(
    plan: Plan[Batch], strategy: Strategy, state: DistState, observers: Sequence[ObserverFn]
) -> tuple[Plan[Batch], Observers]:
    """Make the parts of a step that have state: slot functions and observers."""
    plan = with_stateful(plan, state)
    # `FilledCheck` comes first, since the other observers may compute with the model.
    first = (FilledCheck,) if is_empty(plan.model) else ()
    every = [make(plan, strategy, state) for make in (*first, *plan.observers, *observers)]
    for each in every:
        if not isinstance(each, Observer):
            rule = "return an Observer"
            raise ArgumentTypeError(message("build", "observers", rule, type(each).__name__))
    if state.watchdog is not None:
        every.append(WatchedSteps(state.watchdog))
    return plan, Observers(every)


def _draw_alike(state: DistState) -> None:
    """Make ranks with the same rows draw the same numbers, although each process has its own seed."""
    # Without a default group, ranks are simulated by threads. They share the generators, so there
    # is nothing to copy.
    axes = state.axes if current_world() else ()
    for axis in axes:
        if axis.name != "dp" and axis.world_size > 1:
            own = random_state(state.device)
            first, *_ = primitives.exchange(own, state.along(axis.name), "build")
            restore_random(first, state.device)


def _validated(state: DistState, plan: Plan[Batch]) -> Plan[Batch]:
    """Let every slot function claim its part of the plan, and check the plan without other ranks."""
    for each in plan.entries():
        if isinstance(each, SlotFunction):
            plan = each.claim(plan)
    check_plan(state, plan)
    return plan


def _placed(state: DistState, plan: Plan) -> tuple[DistState, nn.Module]:
    """Prepare the state and the model on this rank.

    An error, such as an OOM, may occur on this rank only.
    """
    state = reduce(lambda state, init_state: init_state(state), plan.init_state, state)
    if plan.init_state:
        check_precision(state, plan.model)
    model = plan.model
    for place in plan.place_model:
        model = place(state, model)
    placed = dict(plan.model.named_parameters())
    for shard in plan.shard_model:
        model = shard(state, model)
    # A strategy that accepts empty models allocates their memory itself, after it has sharded them.
    if not any("takes_empty" in getattr(each, "traits", ()) for each in plan.strategy):
        give_memory(model, state.device)
    if plan.place_model or plan.shard_model:
        for optimizer in plan.optimizers.values():
            follow_shards(optimizer, placed, plan.model)
            follow_parameters(optimizer)
        check_parameters(plan)
    freeze_models(state, plan)
    return state, model


def _check_pair(maker: Stateful, made: Any) -> None:
    """Refuse a function that has only one of `state_dict` and `load_state_dict`.

    A resumed run would lose the state of this function.
    """
    pair = ("state_dict", "load_state_dict")
    held = [name for name in pair if callable(getattr(made, name, None))]
    if len(held) == 1:
        raise PlanError(
            f"build: {describe(maker)} must make a function that has both state_dict and load_state_dict, or "
            f"neither, got {held[0]} alone, of {type(made).__name__}"
        )


def with_stateful(plan: Plan[Batch], state: DistState) -> Plan[Batch]:
    """Return the plan of one step, with a new slot function for each `Stateful`."""
    # State belongs to the step. A plan is data and may be built twice, and the two steps of a GAN
    # share one `DistState`.
    for name in slot_names():
        slot = list(getattr(plan, name))
        for place, each in enumerate(slot):
            if isinstance(each, Stateful):
                slot[place] = made = each(state, plan)
                _check_pair(each, made)
                if each.call:
                    made.call = each.call
                filled: dict[str, Any] = {name: tuple(slot)}
                plan = replace(plan, **filled)
    return plan
