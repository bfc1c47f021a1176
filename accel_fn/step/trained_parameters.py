"""What build settles of an optimizer: which parameters a step trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from accel_fn.errors import PlanError
from accel_fn.step.plan import Plan

_REPAIR = "build again, or train all from the start and freeze(names, until=...) those"


@dataclass(frozen=True, slots=True)
class Settled:
    """The optimizer's parameters, as `build` found them: a step gives gradients for no others."""

    plan: Plan
    lists: Sequence[tuple[list[nn.Parameter], int]]
    """Those of the groups, and how many parameters were in each."""
    given: Sequence[nn.Parameter]
    """All of them."""
    frozen: Sequence[nn.Parameter]
    """Those that required no gradient."""

    @classmethod
    def of(cls, plan: Plan) -> Settled:
        """As they are now."""
        given = [p for each in _lists(plan) for p in each]
        lists = [(each, len(each)) for each in _lists(plan)]
        return cls(plan, lists, given, [p for p in given if not p.requires_grad])

    def check(self) -> None:
        """Refuse parameters that came later, which would not be trained.

        Cost: a look at each group, and at each parameter that was frozen.
        """
        lists = _lists(self.plan)
        if len(lists) != len(self.lists):
            self._compare()
        for now, (then, length) in zip(lists, self.lists, strict=False):
            if now is not then or len(now) != length:
                self._compare()
        for parameter in self.frozen:
            if parameter.requires_grad:
                named = self.plan.model.named_parameters()
                name = next((name for name, each in named if each is parameter), "one")
                raise PlanError(
                    "step: parameters that required no gradient in build must not require one, got "
                    f"{name}; {_REPAIR}"
                )

    def _compare(self) -> None:
        now = [p for each in _lists(self.plan) for p in each]
        if [*map(id, now)] != [*map(id, self.given)]:
            got = "others" if len(now) == len(self.given) else len(now)
            raise PlanError(
                f"step: optimizer must hold the {len(self.given)} parameters that build found in it, "
                f"got {got}; {_REPAIR}"
            )

    def tell(self, trained: Sequence[nn.Parameter], error: Exception) -> None:
        """Say so in words where a backward has failed because parameters were frozen since."""
        for name, parameter in self.plan.model.named_parameters():
            if not parameter.requires_grad and any(parameter is each for each in trained):
                raise PlanError(
                    "step: parameters that required a gradient in build must go on to, got "
                    f"{name}; build again, or freeze those"
                ) from error


def _lists(plan: Plan) -> list[list[nn.Parameter]]:
    return [group["params"] for group in plan.optimizer.param_groups]
