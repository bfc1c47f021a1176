"""Warn about numbers outside of the `state_dict` of an optimizer: a checkpoint loses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from accel_fn.core.plan import Plan
from accel_fn.core.warn import warn_user

_OF_TORCH = {"_step_count", "grad_scale", "found_inf"}
"""Attributes that torch's schedulers and loss scales set on optimizers."""


class OptimizerAttributes:
    """Compares the attributes of optimizers from outside torch with their values at `build`."""

    def __init__(self, plan: Plan) -> None:
        self._found = [
            (each, _numbers(each)) for each in plan.optimizers.values() if _saves_the_usual(each)
        ]
        self._has_warned = False

    def warn(self) -> None:
        """Warn once about attributes that have changed since `build`."""
        if self._has_warned:
            return
        for optimizer, before in self._found:
            changed = [*_changed(before, _numbers(optimizer))]
            if changed:
                self._has_warned = True
                kind = type(optimizer).__name__
                warn_user(
                    f"save: optimizer should hold all that it counts in its state_dict, got {kind}, which "
                    f"has changed {' and '.join(changed)} and gives no such entry; keep it in self.state or "
                    "in a group of param_groups, or override state_dict and load_state_dict"
                )
                return


def _saves_the_usual(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's class is not torch's, but keeps torch's `state_dict`."""
    kind = type(optimizer)
    is_torchs = kind.__module__.startswith("torch.optim.")
    # A `state_dict` that the class overrides, or that has hooks, may save an attribute under
    # another name.
    return (
        not is_torchs
        and kind.state_dict is Optimizer.state_dict
        and not optimizer._optimizer_state_dict_post_hooks
    )


def _numbers(optimizer: Optimizer) -> dict[str, tuple[Any, int]]:
    """Return the numbers and tensors among the attributes, by name, with torch's version of a tensor."""
    return {
        name: (value, value._version if isinstance(value, Tensor) else 0)
        for name, value in vars(optimizer).items()
        if isinstance(value, int | float | Tensor)
        and not isinstance(value, bool)
        and name not in _OF_TORCH
    }


def _changed(before: dict[str, tuple[Any, int]], now: dict[str, tuple[Any, int]]) -> Iterator[str]:
    for name, (value, version) in now.items():
        old, old_version = before.get(name, (None, 0))
        is_same = value is old if isinstance(value, Tensor) else value == old
        if not (is_same and version == old_version):
            yield name
