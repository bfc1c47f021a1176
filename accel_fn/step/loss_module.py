"""The forward of a micro-batch: the user's loss as a module, placed and in its contexts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_fn.base.state import DistState
from accel_fn.errors import BatchError, LossError
from accel_fn.step.plan import ContextFn, LossFn, Plan, describe

T = TypeVar("T")
Outcome = tuple[Tensor, Mapping[str, Tensor]]
"""The mean loss of a micro-batch, [], and its metrics, each []."""


class LossModule(nn.Module):
    """The user's loss as a module: what a strategy wraps in place of the user's model.

    So the model keeps its type, hooks and `state_dict` keys, and the loss may call any method of
    it. The price: gradients must come from the one backward that the step runs.
    """

    def __init__(self, loss_fn: LossFn, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        # If set, all that a rank without items reaches: DDP with find_unused_parameters must
        # find the model's parameters unused there.
        self.idle: nn.Parameter | None = None

    def forward(self, batch: Any) -> Outcome:
        """The mean loss of a batch; for None, a zero that reaches every parameter."""
        if batch is None:
            reached = [self.idle] if self.idle is not None else self.model.parameters()
            zeros = [self._empty_zero(p) for p in reached if p.requires_grad]
            return torch.stack([zero.to(zeros[0]) for zero in zeros]).sum(), {}
        loss = self.loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            _refuse_loss(loss)
        return loss, {}

    def _empty_zero(self, parameter: nn.Parameter) -> Tensor:
        """A zero whose gradient is empty, and sparse where the parameter's always is."""
        tables = [m for m in self.model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        if any(table.sparse and table.weight is parameter for table in tables):
            no_rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
            return F.embedding(no_rows, parameter, sparse=True).sum()
        return parameter.flatten()[:0].sum()


def _refuse_loss(loss: Any) -> None:
    got = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise LossError(
        f"step: loss_fn must return a 0-dim floating-point tensor, got {got}; "
        "return the mean over the batch's items"
    )


def loss_module_of(module: nn.Module) -> LossModule:
    """The user's loss, inside of what was made of it."""
    return next(each for each in module.modules() if isinstance(each, LossModule))


def run_forward(state: DistState, plan: Plan, module: nn.Module, part: Any) -> Outcome:
    """Loss and metrics of one micro-batch; None stands for a rank without items."""
    outcome: Outcome
    if part is None:
        outcome = module(None)
    else:
        outcome = in_contexts(state, plan.forward_contexts, module, placed(state, plan, part))
    return outcome


def run_placed(state: DistState, plan: Plan, call: Callable[[Any], T], part: Any) -> T:
    """`call` on one micro-batch, where the plan places it and in the plan's contexts."""
    return in_contexts(state, plan.forward_contexts, call, placed(state, plan, part))


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
