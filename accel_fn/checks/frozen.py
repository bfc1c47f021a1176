"""Check that frozen models keep the values and the mode that `build` gave them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from accel_fn.core.dtensor import local
from accel_fn.core.plan import Plan
from accel_fn.core.warn import warn_user

_SAMPLE = 64
"""About this many elements of each tensor are compared."""


class FrozenCheck:
    """Checks the frozen models of a plan on the main rank, and warns once about each fault."""

    def __init__(self, plan: Plan) -> None:
        self._frozen = plan.frozen
        self._before: dict[str, Tensor] = {}
        """For each model by name, samples of its tensors at the last check."""
        self._has_warned_of_mode = False
        self._has_warned_of_change = False

    def look(self) -> None:
        """Check the models' mode, and compare their values with those at the last check.

        Cost: a read of about 64 elements of each tensor.
        """
        training = [name for name, model in self._frozen.items() if _trains(model)]
        if training and not self._has_warned_of_mode:
            self._has_warned_of_mode = True
            warn_user(
                "step: frozen models should be in evaluation mode, got "
                f"{_listed(training)} in training mode; leave out train() on them, or give the model that "
                "is trained as a part of Plan's model"
            )
        now = {name: _sample(model) for name, model in self._frozen.items()}
        changed = [name for name, each in self._before.items() if not _are_same(each, now[name])]
        self._before = now
        if changed and not self._has_warned_of_change:
            self._has_warned_of_change = True
            warn_user(
                "step: frozen models should stay as they are, got a change between steps in "
                f"{_listed(changed)}, which checkpoints do not hold; make a model that moves a part of "
                "Plan's model, as in nn.ModuleDict, take ema() for a mean of the weights, or leave it "
                "out of frozen and put it into extras of save and load"
            )


def _trains(model: nn.Module) -> bool:
    return any(module.training for module in model.modules())


def _sample(model: nn.Module) -> Tensor:
    """Return a few elements of each tensor, as one tensor on the host."""
    # Compare values, since a write through `.data` does not change a tensor's version.
    found = [_elements(each) for each in (*model.parameters(), *model.buffers())]
    return (
        torch.cat([each.to(found[0].device) for each in found]).cpu() if found else torch.empty(0)
    )


def _elements(tensor: Tensor) -> Tensor:
    held = local(tensor).detach()
    if held.layout is not torch.strided:
        return torch.empty(0, device=held.device)
    flat = held.reshape(-1)[:: max(1, held.numel() // _SAMPLE)]
    real = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    return real.float()


def _are_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one != one)).all())


def _listed(names: list[str]) -> str:
    return " and ".join(map(repr, names))
