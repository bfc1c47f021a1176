"""Ranks that train apart: the loss as a module whose gradients stay on their rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from accel_fn.step.plan import Asked


class Parting(Asked):
    """In `own_parameters`, what leaves every rank its own gradients: by this a plan is known to."""


class Apart(nn.Module):
    """A module that maps a batch to its loss, and lets nothing of its backward leave the rank."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        """The loss of the module."""
        loss: Tensor = self.module(batch)
        return loss
