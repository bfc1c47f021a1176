"""freeze: keep some parameters unchanged, for good or until a given update."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import SGD

from accel_fn.core.delayed_read import UpdateCount
from accel_fn.core.grads import Grads
from accel_fn.core.plan import GradFn, Plan, SlotFunction, Stateful
from accel_fn.core.report import Report
from accel_fn.core.state import DistState
from accel_fn.core.transform import Transform, fill, transform
from accel_fn.errors import ArgumentTypeError, PlanError, check_count, message


@transform
def freeze(names: str | Sequence[str], *, until: int | None = None) -> Transform:
    """Do not train some parameters, until update number `until`.

    The optimizer gets no gradient for them, so it does not change them, not even by weight decay.
    Clipping and the norm leave them out. From update `until` on they train as the others do. An
    update that is skipped does not count.

    Law: the loop in which these parameters' `.grad` is None until then.
    Tests: `tests/laws/law10_freezing.py`.

    Args:
        names: names of parameters or of modules, as in `model.named_parameters()`; a module's
            name means all that is in it.
        until: the number of the first update that trains them, >= 1; default: no update does.

    Returns:
        A transform.

    Raises:
        TypeError: `names` are not strings.
        ValueError: a name that the model does not have, nothing left to train for good, or
            `until` is not an integer >= 1.

    Cost: for good, none: their gradients are neither computed nor averaged, as with
    `requires_grad_(False)`. With `until`, their gradients are computed and averaged, so that nothing is
    wrapped again when they thaw; on several ranks, one copy of the gradients. On an accelerator where
    updates may be skipped, one host synchronisation before each update that may be number `until`.

    >>> import accel_fn as af
    >>> af.freeze("weight", until=100)(af.Plan(loss_fn, model, optimizer))
    Plan(loss_fn, Linear, SGD, weight_fn=count_samples, wrap_grad_fn=[freeze('weight', until=100)], \
after_update=[freeze('weight', until=100)])
    """
    given: Any = names
    listed = (names,) if isinstance(given, str) or not isinstance(given, Iterable) else (*names,)
    if not listed or not all(isinstance(name, str) for name in listed):
        rule, repair = "be names of parameters or modules", 'such as "encoder"'
        got = names if isinstance(given, str | list | tuple) else type(names).__name__
        raise ArgumentTypeError(message("freeze", "names", rule, got, repair))
    if until is not None:
        check_count("freeze", "until", until)
    slots: dict[str, Any] = {"wrap_grad_fn": ForGood(unchanged, names=listed)}
    if until is not None:
        slots = {
            "wrap_grad_fn": Stateful(frozen, names=listed, until=until),
            "after_update": Stateful(thawing, until=until),
        }
    return fill(
        # Wrap innermost, wherever `freeze` is listed, so that the other functions get no gradients
        # of frozen parameters.
        first=("wrap_grad_fn",),
        check=lambda plan: _check_names(plan, listed, until),
        **slots,
    )


class ForGood(SlotFunction):
    """Excludes parameters from the backward, so that their gradients are never computed."""

    def left_out(self, plan: Plan) -> list[nn.Parameter]:
        """Return the frozen parameters. The strategy does not pass them to the autograd engine."""
        names = self.keywords["names"]
        return [
            each
            for name, each in plan.model.named_parameters()
            if each.requires_grad and _is_named(name, names)
        ]


def unchanged(grad_fn: GradFn, *, names: Sequence[str]) -> GradFn:
    """Return `grad_fn` unchanged, since the strategy computes no gradients of the frozen parameters."""
    return grad_fn


def frozen(state: DistState, plan: Plan, *, names: Sequence[str], until: int) -> Frozen:
    """Make, for one step function, the wrapper that drops the gradients of these parameters."""
    return Frozen(plan, names, until)


def thawing(state: DistState, plan: Plan, *, until: int) -> Thawing:
    """Make, for one step function, the function that thaws parameters frozen until `until`."""
    found = [each for each in plan.wrap_grad_fn if isinstance(each, Frozen) and each.until == until]
    return Thawing(found, until, always=plan.always_applies(state))


class Frozen:
    """Drops the gradients of some parameters while `closed` is True."""

    def __init__(self, plan: Plan, names: Sequence[str], until: int) -> None:
        self.until = until
        self.closed = True
        self._names = names
        name_of = {id(each): name for name, each in plan.model.named_parameters()}
        self._places = {
            place
            for place, each in enumerate(plan.trained())
            if _is_named(name_of[id(each)], names)
        }

    def __call__(self, grad_fn: GradFn) -> GradFn:
        """Return a function that computes gradients and drops those of the frozen parameters."""

        def dropped(state: DistState, batch: Any) -> tuple[DistState, Grads, Report]:
            state, grads, report = grad_fn(state, batch)
            if not self.closed:
                return state, grads, report
            tensors = [
                None if place in self._places else each for place, each in enumerate(grads.tensors)
            ]
            kept = Grads(tensors, grads.factor, norm_fn=grads.norm_fn, owners=grads.owners)
            return state, kept, report

        return dropped


class Thawing:
    """Counts applied updates up to the last one before `until`, then thaws the parameters."""

    def __init__(self, frozen: Sequence[Frozen], until: int, *, always: bool) -> None:
        self._frozen = frozen
        self._until = until
        self._updates = UpdateCount(always=always)
        self._open()

    def __call__(self, state: DistState, report: Report) -> DistState:
        if self._updates.value + 1 < self._until:
            assert report.applied is not None
            self._updates.add(report.applied)
            # Only the device may know whether the newest update was applied. Wait for its answer if
            # the next update may be number `until`.
            if self._updates.value + 2 >= self._until:
                self._updates.read()
            self._open()
        return state

    def _open(self) -> None:
        """Thaw the parameters if the next update is number `until` or a later one; otherwise, freeze them."""
        for each in self._frozen:
            each.closed = self._updates.value + 1 < self._until

    def state_dict(self) -> dict[str, Any]:
        """Return the state that checkpoints hold."""
        return {"num_updates": self._updates.read()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._updates.restore(saved["num_updates"])
        self._open()


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
    is_fused = [
        each
        for each in plan.optimizers.values()
        if isinstance(each, SGD)
        and any(g.get("fused") and g["momentum"] for g in each.param_groups)
    ]
    if until is not None and is_fused:
        raise PlanError(
            "freeze: optimizer must take parameters that come later, got SGD with fused=True and momentum, "
            "whose kernel needs all momenta from the first update on; leave out fused"
        )
    if until is None and not left:
        raise PlanError(
            f"freeze: names must leave a parameter to train, got {list(names)}; give until=..."
        )
