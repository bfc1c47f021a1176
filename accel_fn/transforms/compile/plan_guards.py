"""Refuse changes of hooks, methods and parameters that a compiled step would ignore."""

from __future__ import annotations

from operator import is_

from torch import Tensor

from accel_fn.core.plan import Plan
from accel_fn.core.torch_compile import ModuleGuards
from accel_fn.core.torch_internals import has_hooks
from accel_fn.errors import PlanError


def hooked(plan: Plan) -> str:
    """Return the name of an optimizer's step or a parameter that has hooks; "" if none has."""
    for optimizer in plan.optimizers.values():
        if has_hooks(optimizer):
            return f"{type(optimizer).__name__}.step"
    named = plan.model.named_parameters()
    return next((name for name, each in named if _is_hooked(each)), "")


def _is_hooked(parameter: Tensor | None) -> bool:
    if parameter is None:
        return False
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class PlanGuards:
    """Compares hooks, methods and parameters with those in `build`: torch's guards miss some changes."""

    def __init__(self, plan: Plan) -> None:
        self._optimizers = [*plan.optimizers.values()]
        modules = [*plan.model.modules()]
        self._owners = [*map(vars, modules)]
        self._modules = ModuleGuards(plan.model)
        self._hooks = self._modules.hooks()
        self._homes = [(each._parameters, name) for each in modules for name in each._parameters]
        self._parameters = [home[name] for home, name in self._homes]
        self._functions = self._found()

    def check(self) -> None:
        """Refuse hooks, methods and parameters that were changed after `build`.

        A graph would ignore these changes.

        Cost: a check of each module and each parameter.
        """
        held: list[Tensor | None] = [home.get(name) for home, name in self._homes]
        if not all(map(is_, held, self._parameters)):
            self._refuse("parameters", "load_state_dict without assign=True, or build again")
        if not all(map(is_, self._found(), self._functions)):
            self._refuse(
                "methods of model and optimizer", "replace them before build, or build again"
            )
        # If modules were replaced, read the methods again, and refuse nothing: torch's guards
        # notice replaced modules.
        if self._modules.refresh():
            self._functions = self._found()
        if self._modules.hooks() != self._hooks or self._is_hooked(held):
            self._refuse("hooks", "register them before build, or build again")

    def _is_hooked(self, parameters: list[Tensor | None]) -> bool:
        return any(map(has_hooks, self._optimizers)) or any(map(_is_hooked, parameters))

    def _found(self) -> list[object]:
        """Return the methods of the classes, and the methods that instances have in place of these."""
        found = [*self._modules.methods(), *[own.get("forward") for own in self._owners]]
        for optimizer in self._optimizers:
            step = vars(optimizer).get("step")
            # Ignore the `step` that a scheduler of torch sets on an optimizer: it only counts
            # calls.
            found.append(None if hasattr(step, "_wrapped_by_lr_sched") else step)
            found.append(type(optimizer).step)
        return found

    def _refuse(self, what: str, repair: str) -> None:
        raise PlanError(
            f'step: compiled(scope="step") must have the {what} that its graph was made of, got others; '
            f"{repair}"
        )
