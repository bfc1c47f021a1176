"""The user's own module, without torch's wrappers."""

from __future__ import annotations

from typing import cast

from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """Take a module out of DDP and `torch.compile`, which prefix its keys."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = cast("nn.Module", model.module)
        elif "_orig_mod" in model._modules:
            model = cast("nn.Module", model._modules["_orig_mod"])
        else:
            return model
