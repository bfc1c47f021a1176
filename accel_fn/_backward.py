"""From a batch to its gradients: micro-batches, exact weights, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel_fn import _comm
from accel_fn._errors import BatchError, LossError, message
from accel_fn._grads import Grads
from accel_fn._plan import LossFn, Plan, Report
from accel_fn._state import DistState, LossScale
from accel_fn._torch import run_backward
from accel_fn._weights import weigh


class LossModule(nn.Module):
    """The user's loss as a module: what DDP wraps in place of the user's model.

    Attributes:
        idle: where it is set, all that a rank without items reaches: DDP that
            finds unused parameters must find the model's unused there.
    """

    def __init__(self, loss_fn: LossFn, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.idle: nn.Parameter | None = None

    def forward(self, batch: Any) -> Tensor:
        """The mean loss of a batch; for None, a zero that reaches every parameter."""
        if batch is None:
            reached = [self.idle] if self.idle is not None else self.model.parameters()
            zeros = [p.flatten()[:0].sum() for p in reached if p.requires_grad]
            return torch.stack([zero.to(zeros[0]) for zero in zeros]).sum()
        loss = self.loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            _refuse_loss(loss)
        return loss


def _refuse_loss(loss: Any) -> None:
    got = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise LossError(
        f"step: loss_fn must return a 0-dim floating-point tensor, got {got}; "
        "return the mean over the batch's items"
    )


def forward_context(state: DistState, plan: Plan) -> AbstractContextManager[Any]:
    """What forward and loss run in."""
    if not plan.contexts:
        return nullcontext()
    if len(plan.contexts) == 1:
        return plan.contexts[0](state)
    stack = ExitStack()
    for context in plan.contexts:
        stack.enter_context(context(state))
    return stack


def run_forward(state: DistState, plan: Plan, module: nn.Module, part: Any) -> Tensor:
    """The loss of one micro-batch, placed and in its contexts."""
    for place_batch in plan.place_batch:
        part = place_batch(state, part)
    call: Callable[[Any], Tensor] = module.forward if type(module) is LossModule else module
    if not plan.contexts:
        return call(part)
    with forward_context(state, plan):
        return call(part)


def cut(plan: Plan, batch: Any) -> tuple[Sequence[Any], Sequence[float]]:
    """The micro-batches that count for something, and their weights."""
    if not plan.split:
        weight = weigh(plan.weight_fn, batch)
        return ((batch,), (weight,)) if weight else ((), ())
    weighed = [(part, weigh(plan.weight_fn, part)) for part in plan.split[0](batch)]
    counted = [(part, weight) for part, weight in weighed if weight]
    return [part for part, _ in counted], [weight for _, weight in counted]


@dataclass(frozen=True, slots=True)
class GlobalWeight:
    """The weight of the global batch, on its way over the ranks."""

    sum: Tensor
    work: Any
    failure: Exception | None

    def wait(self) -> float:
        """The weight; raises on every rank if one of them could not count its part."""
        self.work.wait()
        if self.failure is not None:
            raise self.failure
        weight = float(self.sum)
        if weight != weight:
            raise BatchError(
                "step: batch must be countable on every rank; another rank's error says why"
            )
        return int(weight) if weight.is_integer() else weight


def cut_together(
    state: DistState, plan: Plan, batch: Any
) -> tuple[Sequence[Any], Sequence[float], GlobalWeight]:
    """`cut`, and start to sum the weights over the ranks; not-a-number stands for a failure."""
    parts: Sequence[Any] = ()
    weights: Sequence[float] = (float("nan"),)
    failure = None
    try:
        parts, weights = cut(plan, batch)
    except Exception as error:
        failure = error
    total = torch.tensor(float(sum(weights)), dtype=torch.float64)  # integers are exact up to 2**53
    work = _comm.start_sum(total, state, "step")
    return parts, weights, GlobalWeight(total, work, failure)


@dataclass(frozen=True, slots=True)
class Backward:
    """A `GradFn`: forward and backward of every micro-batch, to the exact mean over all ranks.

    Micro-batch k of rank r goes through its backward times
    w[k, r] * world_size / w_total, so that DDP's average over the ranks is the
    mean over the global batch, and nothing passes over the gradients again.
    """

    plan: Plan
    module: nn.Module
    trainable: Sequence[nn.Parameter]
    """Those that a backward may reach."""
    parameters: Sequence[nn.Parameter]
    """Of the optimizer: those that gradients are given for."""
    no_sync: Callable[[], AbstractContextManager[Any]]
    """Keeps the gradients of a micro-batch on this rank: the last one's backward averages them all."""

    def __call__(self, state: DistState, batch: Any) -> tuple[DistState, Grads, Report]:
        for parameter in self.trainable:
            parameter.grad = None
        if state.world_size == 1:
            parts, weights = cut(self.plan, batch)
            if len(parts) == 1:
                return self._one(state, parts[0], weights[0])
            pending = None
        else:
            parts, weights, pending = cut_together(state, self.plan, batch)
        return self._several(state, parts, weights, pending)

    def _one(self, state: DistState, part: Any, weight: float) -> tuple[DistState, Grads, Report]:
        """All of the global batch in one backward: nothing to weigh, nothing to wait for."""
        loss = run_forward(state, self.plan, self.module, part)
        self._check_graph(loss)
        run_backward(loss, backward_seed(loss, 1.0, state.scaler), self.trainable)
        return state, self._take(state, weight), Report(loss=loss.detach().float(), weight=weight)

    def _several(
        self,
        state: DistState,
        parts: Sequence[Any],
        weights: Sequence[float],
        pending: GlobalWeight | None,
    ) -> tuple[DistState, Grads, Report]:
        if not parts:
            parts, weights = (None,), (0,)  # a rank without items still joins every collective
        total: float = 0
        losses: list[Tensor] = []
        shares: list[float] = []
        for index, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            last = index == len(parts) - 1
            with nullcontext() if last else self.no_sync():
                loss = run_forward(state, self.plan, self.module, part)
                if index == 0:
                    total = sum(weights) if pending is None else pending.wait()
                    self._check_graph(loss)
                share = weight / total if total else 0.0
                losses.append(loss.detach())
                shares.append(share)
                if last:
                    mean = start_mean(state, losses, shares)
                seed = backward_seed(loss, share * state.world_size, state.scaler)
                run_backward(loss, seed, self.trainable)
        return state, self._take(state, total), Report(loss=mean(), weight=total)

    def _check_graph(self, loss: Tensor) -> None:
        """Refuse what a backward through DDP would not reach."""
        if not loss.requires_grad:
            raise LossError(
                "step: loss_fn must return a loss with a graph, got one that requires no gradient; "
                "leave out detach() and no_grad()"
            )
        for parameter in self.trainable:
            if parameter.grad is not None:
                raise LossError(
                    "step: loss_fn must leave .grad of the model's parameters alone, got one that writes "
                    "it (backward, or autograd.grad by hand), which no other rank would see; return the loss"
                )

    def _take(self, state: DistState, weight: float) -> Grads:
        """The gradients of the optimizer's parameters, off the parameters."""
        tensors = tuple([parameter.grad for parameter in self.parameters])
        for tensor in tensors:
            if tensor is None and weight:
                self._check_reached()
                break
        for parameter in self.trainable:
            parameter.grad = None
        if state.scaler is None:
            return Grads(tensors)
        double = any(t is not None and t.dtype == torch.float64 for t in tensors)
        scale = state.scaler.scale.double() if double else state.scaler.scale
        return Grads(tensors, scale.reciprocal())

    def _check_reached(self) -> None:
        """Refuse a loss that misses the model, or misses parameters that DDP waits for."""
        named = self.plan.model.named_parameters()
        names = [name for name, p in named if p.requires_grad and p.grad is None]
        nothing = all(parameter.grad is None for parameter in self.parameters)
        finds_unused = getattr(self.module, "find_unused_parameters", True)
        if nothing or (names and not finds_unused):
            some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise LossError(
                f"step: loss_fn must reach the model's parameters by the model given to it, got no gradient "
                f"for {some}; no functional_call on copies, freeze what is not used, or "
                "wrap_ddp(find_unused_parameters=True)"
            )


def backward_seed(loss: Tensor, share: float, scaler: LossScale | None) -> Tensor | None:
    """What the backward starts from in place of one."""
    if scaler is not None:
        scale = scaler.scale.double() if loss.dtype == torch.float64 else scaler.scale
        return (scale * share).to(loss.dtype)
    if share == 1.0:
        return None
    return torch.full((), share, dtype=loss.dtype, device=loss.device)


def cloned(state: DistState, grads: Grads) -> Grads:
    """Gradients that the next backward does not overwrite: DDP's live in its buckets."""
    if state.world_size == 1:
        return grads
    return Grads(tuple([None if t is None else t.clone() for t in grads.tensors]), grads.factor)


def evaluate_loss(state: DistState, plan: Plan, module: nn.Module, batch: Any) -> Tensor:
    """The mean loss over the global batch, without gradients."""
    pending = None
    if state.world_size == 1:
        parts, weights = cut(plan, batch)
    else:
        parts, weights, pending = cut_together(state, plan, batch)
    with torch.no_grad():
        losses = [run_forward(state, plan, module, part) for part in parts]
    total = sum(weights) if pending is None else pending.wait()
    return start_mean(state, losses, [weight / total for weight in weights[: len(losses)]])()


def start_mean(
    state: DistState, losses: Sequence[Tensor], shares: Sequence[float]
) -> Callable[[], Tensor]:
    """Start to sum this rank's losses, times their shares of the global weight, over the ranks."""
    if not any(shares):
        mean = torch.zeros((), device=state.device)
    else:
        mean = losses[0].float() * shares[0]
        for loss, share in zip(losses[1:], shares[1:], strict=True):
            mean = mean.add_(loss, alpha=share)
    if state.world_size == 1:
        return lambda: mean
    work = _comm.start_sum(mean, state, "step")

    def wait() -> Tensor:
        work.wait()
        return mean

    return wait


def check_same_gradients(state: DistState, plan: Plan, grads: Grads) -> None:
    """Raise on every rank if gradients differ between ranks by a single bit.

    Cost: one read of the gradients, one small collective, one host synchronisation.
    """
    prints = [0 if tensor is None else fingerprint(tensor) for tensor in grads.tensors]
    every = _comm.exchange(prints, state, "step")
    trained = {id(p): name for name, p in plan.model.named_parameters()}
    order = [p for group in plan.optimizer.param_groups for p in group["params"] if p.requires_grad]
    for rank, theirs in enumerate(every):
        for parameter, first, other in zip(order, every[0], theirs, strict=True):
            if first != other:
                name = trained[id(parameter)]
                raise LossError(
                    message(
                        "step",
                        "gradients",
                        "be equal on all ranks",
                        f"{name} differs on rank {rank}",
                        "average what a gradient function computes by itself with reduce_mean",
                    )
                )


def fingerprint(tensor: Tensor) -> int:
    """A sum over the bits of a tensor: equal tensors give equal sums."""
    dense = tensor.coalesce().values() if tensor.is_sparse else tensor
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dense.element_size()]
    return int(dense.contiguous().view(bits).sum(dtype=torch.int64))
