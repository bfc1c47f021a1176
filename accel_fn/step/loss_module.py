"""The forward of a micro-batch: the user's loss as a module, placed and in its contexts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_fn.base.state import DistState
from accel_fn.errors import BatchError, LossError
from accel_fn.step.plan import ContextFn, LossFn, Plan, describe

T = TypeVar("T")


class Own(nn.Module):
    """A module of the library's, which nobody but torch's wrappers gives hooks."""


class LossModule(Own):
    """The user's loss as a module: what DDP wraps in place of the user's model."""

    def __init__(self, loss_fn: LossFn, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        # Where it is set, all that a rank without items reaches: DDP that finds unused
        # parameters must find the model's unused there.
        self.idle: nn.Parameter | None = None

    def forward(self, batch: Any) -> Tensor:
        """The mean loss of a batch; for None, a zero that reaches every parameter."""
        if batch is None:
            reached = [self.idle] if self.idle is not None else self.model.parameters()
            zeros = [self._nothing_of(p) for p in reached if p.requires_grad]
            return torch.stack([zero.to(zeros[0]) for zero in zeros]).sum()
        loss = self.loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            _refuse_loss(loss)
        return loss

    def _nothing_of(self, parameter: nn.Parameter) -> Tensor:
        """A zero whose gradient is empty, and sparse where the parameter's always is."""
        tables = [m for m in self.model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        if any(table.sparse and table.weight is parameter for table in tables):
            nowhere = torch.empty(0, dtype=torch.int64, device=parameter.device)
            return F.embedding(nowhere, parameter, sparse=True).sum()
        return parameter.flatten()[:0].sum()


def _refuse_loss(loss: Any) -> None:
    got = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise LossError(
        f"step: loss_fn must return a 0-dim floating-point tensor, got {got}; "
        "return the mean over the batch's items"
    )


def run_forward(state: DistState, plan: Plan, module: nn.Module, part: Any) -> Any:
    """The loss of one micro-batch, and what the module gives beside; None is a rank's without items."""
    call = bare(module)
    return call(None) if part is None else run_placed(state, plan, call, part)


def bare(module: nn.Module) -> Callable[[Any], Any]:
    """What to call of a module: of our own, where nothing goes around it, the forward alone."""
    own = isinstance(module, Own) and not module._forward_pre_hooks
    return module.forward if own and module._compiled_call_impl is None else module


def run_placed(state: DistState, plan: Plan, call: Callable[[Any], T], part: Any) -> T:
    """`call` on one micro-batch, where the plan places it and in the plan's contexts."""
    return in_contexts(state, plan.contexts, call, placed(state, plan, part))


def placed(state: DistState, plan: Plan, part: Any) -> Any:
    """A micro-batch where the plan places it."""
    for place_batch in plan.place_batch:
        part = place_batch(state, part)
        if part is None:  # it stands for a rank without items: loss_fn would not be called
            name = describe(place_batch)
            raise BatchError(f"step: place_batch must return the batch, got None from {name}")
    return part


def in_contexts(
    state: DistState, contexts: Sequence[ContextFn], call: Callable[[Any], T], part: Any
) -> T:
    """`call` in contexts of a plan, the first of them outermost."""
    if not contexts:
        return call(part)
    with contexts[0](state):
        return in_contexts(state, contexts[1:], call, part)
