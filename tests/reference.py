"""The loop by hand that every result is compared with. It uses nothing of accel_fn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def train(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    optimizer: Optimizer,
    batches: Iterable[Any],
    *,
    max_norm: float | None = None,
) -> list[float]:
    """Train on one process, one batch at a time; return the loss of each."""
    losses = []
    for batch in batches:
        loss = loss_fn(model, batch)
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
