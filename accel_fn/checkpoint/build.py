"""build: make a step of a plan, for a new run or for one that continues after an earlier step."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accel_fn.checkpoint.arguments import check_plan
from accel_fn.checkpoint.by_names import OfRun, by_names
from accel_fn.checkpoint.compare import is_model, listed
from accel_fn.checkpoint.run_state import put_back, run_state_of, with_prefix
from accel_fn.checkpoint.schedules import ResumedSchedules, can_restart, restart
from accel_fn.checks.first_batches import FirstBatches
from accel_fn.checks.sequences import SequenceCheck
from accel_fn.core import step as step_build
from accel_fn.core.collectives import all_or_none
from accel_fn.core.dtensor import is_sharded, local
from accel_fn.core.loop import Strategy
from accel_fn.core.observers import ObserverFn
from accel_fn.core.plan import Batch, Plan, unwrapped
from accel_fn.core.state import DistState, check_state, check_world
from accel_fn.core.step import Step
from accel_fn.errors import ArgumentTypeError, PlanError, check_flag, message
from accel_fn.transforms.schedule.advance import schedules_made
from accel_fn.transforms.schedule.schedule import takes_metric

_LOG = logging.getLogger(__name__)


def build(
    plan: Plan[Batch],
    state: DistState,
    *,
    check_loss: bool = True,
    checks: Sequence[ObserverFn] | None = None,
    after: Step[Any] | None = None,
) -> tuple[DistState, Step[Batch]]:
    """Make a step of a plan: the one place that moves, wraps and compiles.

    The model keeps its type, its forward, its hooks and its `state_dict` keys;
    its parameters may move to the device, and take rank 0's values. Building
    twice, also from one plan, gives two steps that work independently. `build` fixes which
    parameters are trained: a step refuses parameters that are added later, to the optimizer
    or by `requires_grad`; build again with `after=step`, and the run continues. Frozen models are
    placed, put into evaluation mode and kept from requiring a gradient; they take rank 0's values,
    too.

    On a mesh, ranks that differ in other axes than `dp` hold the same rows, so they must draw the
    same random numbers: each gets the states of the Python, NumPy and torch generators of the first
    such rank.

    Args:
        plan: describes the step; it is not changed.
        state: this rank's state, from `init()`, or `DistState()` for one process on the CPU.
        check_loss: if batches are cut over ranks or micro-batches, compare a few rows of batches 1,
            2, 10 and 100 with their parts: losses, gradients, metrics, and writes of the forward.
            The step raises if the plan's `reduction`, or the `shift` of `count_labels`, does not
            fit and another one does, if the forward writes trained parameters, or if a loss that
            calls collectives depends on how rows are dealt to ranks. It warns once if anything else
            depends on the cut. `explain(step, state)` shows the result.
        checks: functions `(plan, strategy, state) -> Observer`, instead of the checks that every
            step makes by default; `()` makes none. `check_loss` is a setting of the default checks.
        after: the step that this one follows in the same run, as after unfreezing. It takes over the counts
            of transforms, averages, the moments of the optimizers and the position of schedules, and the
            folders of checkpoints; the loss scale and the position of the run are in `state`, the newest one.
            Parameters are matched by the object, by name where objects differ; optimizers by their class;
            transforms by slot and name. Settings of groups, such as rates and weight decay, are the
            plan's: schedules are stepped from these to the update that the run has reached. The
            main rank logs, as a warning, the parts that begin anew. Do not use the earlier step
            again.

    Returns:
        The state, with additions of transforms (such as a loss scale), and the step.

    Raises:
        ValueError: on every rank: transforms that cannot be combined, an optimizer
            over other parameters than the model's, a frozen model without values or with a parameter of
            the model, nothing to train, a model on the CPU while the
            state has an accelerator and nothing places the model there, or several ranks and no
            strategy that shares the step among them. With `after`: a step of another world or
            strategy, or between two averages of `local_sgd`; no parameter of the model is a
            parameter of that step, by object or by name; a parameter of the same name has another
            shape; a `state` that is older than that of the step.
        RuntimeError: ranks build different plans.

    Law: without transforms, a step is the loop by hand, to the bit. Any order of the transforms
    gives the same step, or is refused. Tests: `tests/laws/law01_no_transforms.py`,
    `tests/laws/law04_order_of_transforms.py`.

    Cost: in a world of several, four small collectives, on a mesh two more for each axis other than
    `dp`, and the cost of transforms: those that train on several ranks broadcast the parameters;
    frozen models are broadcast. `check_loss` costs six or seven forwards and backwards of 8 to 15
    samples, not compiled, in each of those four steps, up to twice as many if the program draws or
    writes, and three small collectives in a world of several; everything is restored. It takes no
    more memory than a step. `after` steps schedules on the host and copies averages; it copies
    moments if parameters are other objects.

    >>> import accel_fn as af
    >>> plan = af.clip(1.0)(af.Plan(loss_fn, model, optimizer))
    >>> state, step = af.build(plan, af.DistState())
    """
    check_flag("build", "check_loss", check_loss)
    observers = _default_checks(plan, check_loss) if checks is None else checks
    if not isinstance(observers, Sequence) or not all(map(callable, observers)):
        rule = "be a sequence of functions (plan, strategy, state) -> Observer, or None"
        raise ArgumentTypeError(message("build", "checks", rule, checks))
    if after is None:
        return step_build.build(plan, state, observers)
    check_state("build", state)
    check_world("build", state)
    names = all_or_none(partial(_names, state, plan, after), state, "build")
    built, step = step_build.build(plan, state, observers)
    new = all_or_none(lambda: _take_over(built, step, after, names), state, "build")
    step.notes.update(after.notes)
    if new and state.is_main:
        _LOG.warning("build: the run goes on after the step; new are:\n%s", listed(new))
    return built, step


def _default_checks(plan: Plan, check_loss: bool) -> Sequence[ObserverFn]:
    """Return the checks that a step makes by default."""
    first = partial(FirstBatches, check_loss=check_loss)
    cuts = check_loss and isinstance(plan, Plan) and plan.having("cuts_sequences")
    return (SequenceCheck, first) if cuts else (first,)


def _names(state: DistState, plan: Plan, after: Step) -> dict[str, str]:
    """Map parameter names here to those in the earlier step; refuse a step of another run."""
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(message("build", "plan", "be a Plan", type(plan).__name__))
    if not isinstance(after, Step):
        rule = "be the step that build gave before"
        raise ArgumentTypeError(message("build", "after", rule, type(after).__name__))
    after.check_follows(state)
    check_plan(after.plan, "check_followed")
    if type(after.strategy).whole is not Strategy.whole:
        raise PlanError(
            f"build: after must be a step whose model can be built again, got {type(after.strategy).__name__}"
            '; save, make the model again, and load with match="names"'
        )
    before = dict(unwrapped(after.plan.model).named_parameters())
    name_of = {id(each): name for name, each in before.items()}
    here = dict(unwrapped(plan.model).named_parameters())
    by_object = {name: name_of[id(each)] for name, each in here.items() if id(each) in name_of}
    taken = {*by_object.values()}
    by_name = sorted(here.keys() & before.keys() - by_object.keys() - taken)
    names = {**by_object, **{name: name for name in by_name}}
    if not names:
        raise PlanError(
            "build: after must be a step of this run, got one whose model has no parameter of this one, "
            "neither the object nor its name; leave after out, or keep the names"
        )
    for name in by_name:
        shape, own = (list(each.shape) for each in (before[name], here[name]))
        if shape != own:
            raise PlanError(
                f"build: after must have parameters of the same shapes, got {shape} for {name}, {own} here; "
                "give the new one another name"
            )
    return {name: names[name] for name in here if name in names}


def _take_over(state: DistState, step: Step, after: Step, names: Mapping[str, str]) -> list[str]:
    """Load the state of the earlier step into the new step; return a line for each part that begins anew."""
    if type(step.strategy) is not type(after.strategy):
        kinds = [type(each.strategy).__name__ for each in (after, step)]
        raise PlanError(
            f"build: after must be a step of the same strategy, got {kinds[0]}, here {kinds[1]}; save, and "
            'load with match="names"'
        )
    earlier, here = run_state_of({"": after}), run_state_of({"": step})
    run = OfRun({**earlier.tensors}, dict(earlier.rest), dict(earlier.plans))
    found = by_names(run, here, {"": step}, {"": names})
    tensors = {n: each for n, each in found.entries.items() if not is_model(n)}
    for name, tensor in with_prefix("transforms/", tensors).items():
        own = here.tensors.get(f"transforms/{name}")
        if own is not None and own.shape != tensor.shape:
            shapes = f"{list(tensor.shape)} in the step, {list(own.shape)} here"
            raise PlanError(
                "build: after must be a step whose transforms have state of the same shapes, got "
                f"{name} of {shapes}; give the transform the same settings"
            )
    kept = {*map(id, after.plan.optimizers.values())}
    moved = [name for name, each in step.plan.optimizers.items() if id(each) not in kept]
    _restart_schedules(step, after)
    found.rests[""]["model"] = {}
    resumed = ResumedSchedules({"": step}, found.rests, {}, {}, None, by_names=True)
    obstacles = [*resumed.obstacles()]
    if obstacles:
        raise PlanError(f"build: schedules must reach the update of the run\n{listed(obstacles)}")
    placed = _placed(tensors, step, after, moved, names)
    put_back(step, "", placed, found.rests[""], optimizers=moved, fresh=())
    resumed.follow(state)
    return found.new


def _restart_schedules(step: Step, after: Step) -> None:
    """Start new schedulers from the learning rates with which the run began, as a new run would."""
    same = {id(each.scheduler) for each in schedules_made(after.plan)}
    new = [each for each in schedules_made(step.plan) if id(each.scheduler) not in same]
    new = [each for each in new if not takes_metric(each.scheduler)]
    with ExitStack() as stack:
        for each in new:
            stack.enter_context(each.rates_as_numbers())
        by_itself = [each.scheduler.optimizer for each in new if not can_restart(each.scheduler)]
        for optimizer in dict.fromkeys(each.scheduler.optimizer for each in new):
            for group in optimizer.param_groups if optimizer not in by_itself else ():
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(group["initial_lr"])
                else:
                    group["lr"] = group["initial_lr"]
        for each in new:
            restart(each.scheduler)


def _placed(
    tensors: Mapping[str, Tensor],
    step: Step,
    after: Step,
    optimizers: Collection[str],
    names: Mapping[str, str],
) -> dict[str, Tensor]:
    """Return the state tensors that the new step takes over; copy those of replaced parameters."""
    here = dict(unwrapped(step.plan.model).named_parameters())
    before = dict(unwrapped(after.plan.model).named_parameters())
    found = {name: each for name, each in tensors.items() if name.startswith("transforms/")}
    for optimizer in optimizers:
        for place, value in with_prefix(f"{optimizer}/", tensors).items():
            name = place.rpartition("/")[0]
            is_same = here[name] is before[names[name]]
            found[f"{optimizer}/{place}"] = value if is_same else _copied(value, here[name])
    return found


def _copied(value: Tensor, parameter: Tensor) -> Tensor:
    """Copy the state tensor of an earlier parameter; the copy is sharded like the new parameter."""
    if not is_sharded(parameter) or value.shape != parameter.shape:
        # No need to choose a device here: the load moves the copy to the device of the parameter,
        # unless the copy is a step count.
        return value.clone()
    copy = torch.zeros_like(parameter.detach(), dtype=value.dtype)
    local(copy).copy_(local(value))
    return copy
