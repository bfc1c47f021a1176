"""build and Step: the one place with effects, and what it makes of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accel_fn.base.state import DistState, check_state
from accel_fn.comm.collectives import all_or_none
from accel_fn.comm.primitives import check_joined
from accel_fn.errors import ArgumentError, ArgumentTypeError, StateError, message
from accel_fn.step.backward import cloned
from accel_fn.step.global_mean import SummedTally, mean_loss
from accel_fn.step.gradient_fn import gradient_fn
from accel_fn.step.grads import Grads
from accel_fn.step.loss_module import LossModule, run_forward
from accel_fn.step.microbatches import cut_or_fail
from accel_fn.step.plan import GradFn, Plan, Report, describe, with_kept
from accel_fn.step.plan_checks import check_parameters, check_plan, check_precision
from accel_fn.step.same_on_all_ranks import check_same_gradients, check_same_plan
from accel_fn.step.update import apply_update, follow_parameters, follow_shards
from accel_fn.transforms.compile.whole_step import Whole, whole_step
from accel_fn.transforms.fsdp.sharded_loss import Sharded, evened, shards_alone
from accel_fn.transforms.local_sgd.local_gradients import Apart


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Step:
    """One training step: `step(state, batch) -> (state, report)`. Made by `build`.

    `step(state, batch)` is `grads` and `update` in turn. The state is a value:
    keep the new one. Model and optimizer are the user's objects and change in
    place, as in any loop.

    >>> import accel_fn as af
    >>> state, step = af.build(af.DistState(), af.Plan(loss_fn, model, optimizer))
    >>> state, report = step(state, batch)
    >>> state.step, report.weight, bool(report.applied)
    (1, 8, True)
    """

    plan: Plan
    _built_with: DistState
    _module: nn.Module
    """The loss, as a forward alone runs it."""
    _grad_fn: GradFn
    _parameters: Sequence[nn.Parameter]
    _always: Tensor
    """What `applied` says where nothing is checked."""
    _unchecked: list[bool]
    """Holds an entry until the gradients of a first update were compared over the ranks."""
    _whole: Whole | None = None
    """All of a call as one compiled function."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What saving and loading have to remember of this run; nothing that a step reads."""

    def __call__(self, state: DistState, batch: Any) -> tuple[DistState, Report]:
        """Consume one batch: this rank's part of it.

        Args:
            state: what `build`, or the last step, gave.
            batch: a tree of tensors, each [num_samples, ...]; may be empty, or weigh nothing.

        Returns:
            The state with `step` one further, and the report.

        Raises:
            ValueError: the state is another world's; the batch cannot be counted;
                the loss cannot be trained on.

        Cost: the sum of its transforms'. No host synchronisation of its own but for one in the
        first update of several ranks, where what the optimizer sees is compared.
        """
        self._check_state(state)
        if self._whole is not None and self._whole.is_ready():
            return self._whole(state, batch)
        state, grads, report = self._run(state, batch)
        return self._update(state, grads, report)

    def forward(self, state: DistState, batch: Any) -> Tensor:
        """The mean loss over the global batch, as the step would compute it, without gradients.

        Runs under the same placement, micro-batches and autocast, in whatever
        mode the model is: call `model.eval()` first where that matters.

        Args:
            state: as for the step.
            batch: as for the step.

        Returns:
            [], float32, on the device; the same on every rank. 0 where nothing counts.

        Cost: two small collectives in a world of several, and what `wrap_fsdp` gathers.
        """
        self._check_state(state)
        parts, weights, failure = cut_or_fail(self.plan, batch)
        tally = SummedTally(state, weights, failure)
        parts, weights = evened(self._module, state, tally, parts, weights)
        with torch.no_grad():
            losses = [run_forward(state, self.plan, self._module, part) for part in parts]
        return mean_loss(state, tally, losses, weights)

    def grads(self, state: DistState, batch: Any) -> tuple[DistState, Grads, Report]:
        """Gradients of the global batch, on all ranks alike, without an update.

        Args:
            state: as for the step.
            batch: as for the step.

        Returns:
            The state, the gradients with their factor open, and a report
            without `applied`.

        Cost: as the step up to the optimizer; in a world of several also one
        copy of the gradients, since the next backward reuses the memory of these.
        """
        self._check_state(state)
        state, grads, report = self._run(state, batch)
        return state, grads if self.plan.grad_fns else cloned(state, grads), report

    def update(self, state: DistState, grads: Grads, report: Report) -> tuple[DistState, Report]:
        """Gradient transforms, then the optimizer, then what comes after; counts one batch.

        Args:
            state: as `grads` gave it, or a later one.
            grads: used up: their tensors may be overwritten.
            report: of these gradients; `grad_norm` and `applied` are filled in.

        Returns:
            The state with `step` one further, and the report.

        Raises:
            ValueError: the state is another world's; gradients and report are not what a step
                of this model gives.

        Cost: one read of the gradients with float16 or `clip`, and the optimizer's.
        """
        self._check_state(state)
        self._check_outcome(grads, report)
        shards_alone(self._module)
        return self._update(state, grads, report)

    def _run(self, state: DistState, batch: Any) -> tuple[DistState, Grads, Report]:
        """Gradients, watched: DDP talks in it, and its errors are those of the group."""
        if state.watchdog is None:
            return self._grad_fn(state, batch)
        state.watchdog.begin_step(state.step + 1)
        try:
            return self._grad_fn(state, batch)
        except RuntimeError as error:
            state.watchdog.diagnose(error, "step")
            raise

    def _update(self, state: DistState, grads: Grads, report: Report) -> tuple[DistState, Report]:
        plan, scaler = self.plan, state.scaler
        finite = None if scaler is None else torch.isfinite(grads.norm())
        ok = finite
        for judge in plan.verdicts:
            verdict = judge(state, grads)
            ok = verdict if ok is None else ok & verdict
        for transform in plan.gradients:
            grads = transform(state, grads)
            if not isinstance(grads, Grads):
                rule = f"return Grads, {describe(transform)} does not"
                raise ArgumentTypeError(message("step", "gradients", rule, type(grads).__name__))
        if self._unchecked and self._unchecked.pop():
            check_same_gradients(state, plan, grads)
        apply_update(plan.optimizer, self._parameters, grads, ok)
        norm = grads.norm_read
        report = Report(
            loss=report.loss,
            weight=report.weight,
            grad_norm=None if norm is None else norm.float(),
            applied=self._always if ok is None else ok,
            extras=report.extras,
        )
        if scaler is not None and finite is not None:
            scaler = scaler.adjust(finite)
        state = state.advanced(scaler)
        for after in plan.after:
            state = after(state, report)
        return state, report

    def _check_state(self, state: DistState) -> None:
        check_state("step", state)
        built = self._built_with
        if (
            state.group is not built.group
            or state.rank != built.rank
            or state.world_size != built.world_size
            or state.device != built.device
        ):
            raise StateError(
                f"step: state must be of the world it was built in, got {state}, built with {built}"
            )
        if built.scaler is not None and state.scaler is None:
            raise StateError(
                "step: state must carry a loss scale, got none; go on from the state that build gave"
            )
        check_joined(state, "step")

    def _check_outcome(self, grads: Grads, report: Report) -> None:
        """Refuse what is not what `grads` gave."""
        for name, value, kind in (("grads", grads, Grads), ("report", report, Report)):
            if not isinstance(value, kind):
                rule, got = f"be a {kind.__name__}, as step.grads gives it", type(value).__name__
                raise ArgumentTypeError(message("step.update", name, rule, got))
        if len(grads.tensors) != len(self._parameters):
            rule = (
                f"hold one tensor, or None, for each of {len(self._parameters)} trained parameters"
            )
            raise ArgumentError(message("step.update", "grads", rule, len(grads.tensors)))

    def __repr__(self) -> str:
        return f"Step({self.plan!r})"


def build(state: DistState, plan: Plan) -> tuple[DistState, Step]:
    """Make a step of a plan: the one place that moves, wraps and compiles.

    The model keeps its type, its forward, its hooks and its `state_dict` keys;
    its parameters may move to the device, and take rank 0's values. Building
    twice, also from one plan, gives two steps that work independently. Which
    parameters are trained is settled here: a step refuses those that come later, into the optimizer
    or by `requires_grad`; build again.

    Args:
        state: of this rank, from `init()`, or `DistState()` for one process on the CPU.
        plan: what the step is made of; not changed.

    Returns:
        The state with what transforms add to it (a loss scale), and the step.

    Raises:
        ValueError: on every rank alike, transforms that cannot be combined, an optimizer
            over other parameters than the model's, nothing to train, or several ranks and
            nothing that averages over them.
        RuntimeError: ranks build different plans.

    Cost: in a world of several, four small collectives, and what transforms do: those that train
    on several ranks broadcast the parameters.

    >>> import accel_fn as af
    >>> plan = af.clip(1.0)(af.Plan(loss_fn, model, optimizer))
    >>> state, step = af.build(af.DistState(), plan)
    """
    check_state("build", state)
    if not isinstance(plan, Plan):
        rule = "be a Plan"
        raise ArgumentTypeError(message("build", "plan", rule, type(plan).__name__))
    all_or_none(lambda: check_plan(state, plan), state, "build")
    check_same_plan(state, plan)
    built, model = all_or_none(lambda: _placed(state, plan), state, "build")
    loss_module = LossModule(plan.loss_fn, model)
    module: nn.Module = loss_module
    parameters = dict(plan.model.named_parameters())
    for wrap in (*plan.compile_loss, *plan.own_parameters):
        module = wrap(built, module)
    follow_shards(plan.optimizer, parameters, plan.model)
    plan = all_or_none(partial(with_kept, plan, built), state, "build")
    step = Step(
        plan=plan,
        _built_with=built,
        _module=module if isinstance(module, Sharded) else loss_module,
        _grad_fn=gradient_fn(built, plan, module),
        _parameters=plan.trained(),
        _always=torch.ones((), dtype=torch.bool, device=built.device),
        _unchecked=[True] if built.world_size > 1 and not isinstance(module, Apart) else [],
        _whole=whole_step(built, plan, loss_module) if plan.compile_step else None,
    )
    return built, step


def _placed(state: DistState, plan: Plan) -> tuple[DistState, nn.Module]:
    """State and model where this rank begins: what may fail on one rank alone, where memory runs out say."""
    model = plan.model
    for start in plan.starts:
        state = start(state)
    if plan.starts:
        check_precision(state, model)
    for move in plan.move_model:
        model = move(state, model)
    if plan.move_model:
        check_parameters(plan)
        follow_parameters(plan.optimizer)
    return state, model
