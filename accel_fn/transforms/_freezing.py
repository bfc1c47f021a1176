"""freeze: some parameters stay as they are, for good or until a given step."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from accel_fn._errors import ArgumentTypeError, PlanError, check_count, message
from accel_fn._grads import Grads
from accel_fn._plan import GradFn, Kept, Plan, Report, Transform
from accel_fn._state import DistState


def freeze(names: str | Sequence[str], *, until: int | None = None) -> Transform:
    """Leave some parameters as they are, until step number `until`.

    The optimizer is given no gradient for them, so it does nothing to them, no weight decay
    either; clipping and the norm do not see them. From then on they train as the others do.

    Law: the loop in which these parameters' `.grad` is None so long.

    Args:
        names: names of parameters or of modules, as in `model.named_parameters()`; a module's
            name means all that is in it.
        until: the first step, counted as `state.step` is, that trains them, >= 1; default: none.

    Returns:
        A transform.

    Raises:
        TypeError: `names` are no strings.
        ValueError: a name that the model does not have, nothing left to train for good, or
            `until` is no integer >= 1.

    Cost: their gradients are computed and averaged all the same, so that nothing has to be wrapped
    anew at that step; in a world of several one copy of the gradients. Where it is for good,
    `requires_grad_(False)` on the model costs less.

    >>> import accel_fn as af
    >>> af.freeze("weight", until=100)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=num_samples, grad_fns=[frozen(names=('weight',), until=100)])
    """
    listed = (names,) if isinstance(names, str) else tuple(names)
    if not listed or not all(isinstance(name, str) for name in listed):
        rule = "be names of parameters or modules"
        raise ArgumentTypeError(message("freeze", "names", rule, names))
    if until is not None:
        check_count("freeze", "until", until)
    freezing = Kept(frozen, names=listed, until=until)

    def freeze_plan(plan: Plan) -> Plan:
        _check_names(plan, listed, until)
        return replace(
            plan, grad_fns=(freezing, *plan.grad_fns)
        )  # innermost, wherever it is listed

    return freeze_plan


def frozen(
    state: DistState, plan: Plan, *, names: Sequence[str], until: int | None
) -> Callable[[GradFn], GradFn]:
    """What takes the gradients of these parameters away, of one step."""
    name_of = {id(each): name for name, each in plan.model.named_parameters()}
    places = {
        place for place, each in enumerate(plan.trained()) if _is_named(name_of[id(each)], names)
    }

    def without(grad_fn: GradFn) -> GradFn:
        def dropped(state: DistState, batch: Any) -> tuple[DistState, Grads, Report]:
            thawed = until is not None and state.step + 1 >= until
            state, grads, report = grad_fn(state, batch)
            if thawed:
                return state, grads, report
            tensors = [
                None if place in places else each for place, each in enumerate(grads.tensors)
            ]
            return state, Grads(tensors, grads.factor), report

        return dropped

    return without


def _is_named(name: str, names: Sequence[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in names)


def _check_names(plan: Plan, names: Sequence[str], until: int | None) -> None:
    name_of = {id(each): name for name, each in plan.model.named_parameters()}
    for name in names:
        if not any(_is_named(each, [name]) for each in name_of.values()):
            near = difflib.get_close_matches(name, name_of.values(), n=1)
            repair = f"; did you mean {near[0]}?" if near else ""
            raise PlanError(
                f"freeze: names must be of parameters or modules of the model, got {name!r}{repair}"
            )
    left = [each for each in plan.trained() if not _is_named(name_of.get(id(each), ""), names)]
    if until is None and not left:
        raise PlanError(
            f"freeze: names must leave a parameter to train, got {list(names)}; give until=..."
        )
