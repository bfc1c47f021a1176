"""Which parameters the losses of a step reach: those that they miss would not be trained."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from accel_fn.base.warn import warn_user
from accel_fn.errors import LossError, PlanError
from accel_fn.step.plan import Plan
from accel_fn.step.trained_parameters import replaced


class Reached:
    """Looks at which gradients are missing, in every step."""

    def __init__(
        self, plan: Plan, reachable: Sequence[nn.Parameter], *, finds_unused: bool, is_main: bool
    ) -> None:
        self._plan = plan
        self._trained = plan.trained()
        self._known = {*map(id, reachable), *map(id, plan.model.parameters())}
        self._finds_unused = finds_unused
        """May a loss miss parameters?"""
        self._is_main = is_main
        self.unused: list[str] = []
        """Parameters that a loss on one process has missed, and that several ranks would wait for."""
        self._looks_for_unused = finds_unused and bool(plan.having("needs_every_parameter"))
        self._seen: set[tuple[bool, ...]] = set()
        """Which gradients were missing in steps that were right."""

    def check_gradients(self, grads: Sequence[Tensor | None], weighs: bool) -> None:
        """Check the gradients of a step: the loss may miss some parameters, not all."""
        if not weighs:
            return
        missing = tuple([grad is None for grad in grads])
        if True in missing and missing not in self._seen:
            self.check_reached()
            self._seen.add(missing)
            if self._looks_for_unused and not self.unused:
                self._note_unused()

    def _note_unused(self) -> None:
        """Warn once of what one process trains and several ranks refuse."""
        named = self._plan.model.named_parameters()
        self.unused = [n for n, p in named if p.requires_grad and p.grad is None]
        if self._is_main:
            warn_user(
                "step: loss_fn should reach all parameters that require a gradient, got none for "
                f"{_some(self.unused)}, which wrap_ddp refuses on several ranks; freeze what is not used, or "
                "wrap_ddp(find_unused_parameters=True)"
            )

    def check_reached(self) -> None:
        """Refuse a loss that misses the model, or misses parameters that DDP waits for."""
        named = self._plan.model.named_parameters()
        missed = {n: p for n, p in named if p.requires_grad and p.grad is None}
        for name, parameter in missed.items():
            if id(parameter) not in self._known:
                raise replaced(name)
        nothing = all(parameter.grad is None for parameter in self._trained)
        if nothing or (missed and not self._finds_unused):
            for name, parameter in missed.items():
                if parameter._post_accumulate_grad_hooks:
                    raise PlanError(
                        "step: model must have no post-accumulate-grad hooks that clear all gradients, "
                        f"got one on {name}; let the optimizer step after the backward"
                    )
            raise not_reached([*missed])


def not_reached(names: Sequence[str]) -> LossError:
    """The error for a loss whose backward leaves these parameters out."""
    some = _some(names)
    return LossError(
        f"step: loss_fn must reach the model's parameters by the model given to it, got no gradient "
        f"for {some or 'some in the last micro-batch'}; no functional_call on copies, freeze what is not "
        "used, or wrap_ddp(find_unused_parameters=True)"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
