"""What build settles of an optimizer: which parameters a step trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from accel_fn._errors import PlanError
from accel_fn._plan import Plan

_REPAIR = "build again, or train all from the start and freeze(names, until=...) those"


@dataclass(frozen=True, slots=True)
class Settled:
    """The optimizer's parameters, as `build` found them: a step gives gradients for no others."""

    plan: Plan
    num_parameters: int
    frozen: Sequence[nn.Parameter]
    """Those that required no gradient."""

    @classmethod
    def of(cls, plan: Plan) -> Settled:
        """As they are now."""
        given = [p for group in plan.optimizer.param_groups for p in group["params"]]
        return cls(plan, len(given), [p for p in given if not p.requires_grad])

    def check(self) -> None:
        """Refuse parameters that came later, which would not be trained.

        Cost: a look at each group, and at each parameter that was frozen.
        """
        now = sum([len(group["params"]) for group in self.plan.optimizer.param_groups])
        if now != self.num_parameters:
            raise PlanError(
                f"step: optimizer must hold the {self.num_parameters} parameters that build found in it, "
                f"got {now}; {_REPAIR}"
            )
        for parameter in self.frozen:
            if parameter.requires_grad:
                named = self.plan.model.named_parameters()
                name = next((name for name, each in named if each is parameter), "one")
                raise PlanError(
                    "step: parameters that required no gradient in build must not require one, got "
                    f"{name}; {_REPAIR}"
                )

    def tell(self, trained: Sequence[nn.Parameter], error: Exception) -> None:
        """Say so in words where a backward has failed because parameters were frozen since."""
        for name, parameter in self.plan.model.named_parameters():
            if not parameter.requires_grad and any(parameter is each for each in trained):
                raise PlanError(
                    "step: parameters that required a gradient in build must go on to, got "
                    f"{name}; build again, or freeze those"
                ) from error
