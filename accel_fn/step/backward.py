"""From a batch to its gradients: every micro-batch forward and backward, to the exact global mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from accel_fn.base.state import DistState, LossScale
from accel_fn.errors import LossError, PeerError
from accel_fn.step.global_mean import OwnTally, SummedTally, Tally
from accel_fn.step.grads import Grads
from accel_fn.step.graph_checks import check_recomputed
from accel_fn.step.loss_module import run_forward
from accel_fn.step.microbatches import Parts, Weights, cut_or_fail
from accel_fn.step.plan import Plan, Report
from accel_fn.step.torch_internals import run_backward
from accel_fn.step.trained_parameters import Settled
from accel_fn.transforms.ddp.bucket_scalars import CarriedTally, Carrier
from accel_fn.transforms.fsdp.replay_after_oom import Way, accompany
from accel_fn.transforms.fsdp.sharded_loss import Sharded, evened
from accel_fn.transforms.local_sgd.local_gradients import Apart


@dataclass(frozen=True, slots=True)
class Backward:
    """A `GradFn`: forward and backward of every micro-batch, to the exact mean over all ranks.

    Every micro-batch goes through its backward times its share, which a tally
    gives, so that DDP's average over the ranks is the mean over the global
    batch, up to a factor that the gradients are given with.
    """

    plan: Plan
    module: nn.Module
    trainable: Sequence[nn.Parameter]
    """Those that a backward may reach."""
    parameters: Sequence[nn.Parameter]
    """Of the optimizer: those that gradients are given for."""
    settled: Settled
    carrier: Carrier | None
    """Takes loss and weight along with the gradients, where that is how they travel."""
    no_sync: Callable[[], AbstractContextManager[Any]]
    """Keeps the gradients of a micro-batch on this rank: the last one's backward averages them all."""
    agree: Callable[[DistState], None] | None = None
    """Called when all gradients of this rank are there, before any are averaged."""
    way: Way | None = None
    """Of a module in shards: the collectives, which a rank joins though its memory has run out."""
    _unseen: list[bool] = field(default_factory=lambda: [True])
    """Holds an entry until the graph of a first micro-batch was looked at."""
    _idle: list[bool] = field(default_factory=list)
    """Of each parameter: did the last backward that missed some miss it?"""

    def __call__(self, state: DistState, batch: Any) -> tuple[DistState, Grads, Report]:
        try:
            if not isinstance(self.module, Sharded):
                return self._run(state, batch)
            with self.module.clean():
                return self._run(state, batch)
        except RuntimeError as error:
            self.settled.tell(self.parameters, error)
            raise

    def _run(self, state: DistState, batch: Any) -> tuple[DistState, Grads, Report]:
        for parameter in self.trainable:
            parameter.grad = None
        stop = any(ask() for ask in self.plan.stops)
        parts, weights, failure = cut_or_fail(self.plan, batch, self.settled)
        if state.world_size == 1 and len(parts) == 1:
            return self._one(state, parts[0], weights[0], stop)
        tally: Tally
        if isinstance(self.module, Apart):
            tally = OwnTally(state, weights, failure, stop=stop)
        elif self.carrier is None:
            tally = summed = SummedTally(state, weights, failure, stop=stop)
            parts, weights = evened(self.module, state, summed, parts, weights)
        else:
            tally = CarriedTally(self.carrier, state, weights, failure, stop=stop)
        return self._several(state, parts, weights, tally)

    def _one(
        self, state: DistState, part: Any, weight: float, stop: bool
    ) -> tuple[DistState, Grads, Report]:
        """All of the global batch in one backward: nothing to weigh, nothing to wait for."""
        loss = run_forward(state, self.plan, self.module, part)
        self._check_graph(loss, part)
        run_backward(loss, backward_seed(loss, 1.0, state.scaler), self.trainable)
        return state, self._take(state, weight), self._report(loss.detach().float(), weight, stop)

    def _several(
        self, state: DistState, parts: Parts, weights: Weights, tally: Tally
    ) -> tuple[DistState, Grads, Report]:
        if not parts or self.agree:  # a rank without items still joins every collective
            parts, weights = (*parts, None), (*weights, 0)
        if self.way is None:
            self._go(state, weights, tally, tally.add, parts)
        else:
            go = partial(self._go_anew, state, weights, tally, self.way.counted(tally.add))
            accompany(state, self.way, go, parts)
        try:
            mean, total, factor = tally.close()
        except PeerError:
            self._check_reached()  # where DDP waits for a parameter, nothing has arrived
            raise
        own = {"own_weight": tally.own} if isinstance(tally, OwnTally) else {}
        report = self._report(mean, total, tally.stop, **own)
        return state, self._take(state, total, factor), report

    def _go(
        self,
        state: DistState,
        weights: Weights,
        tally: Tally,
        add: Callable[..., None],
        parts: Parts,
    ) -> None:
        """Forward and backward of each micro-batch; `add` is the tally's."""
        for index, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            last = index == len(parts) - 1
            if last and self.agree:
                if index:
                    self._check_reached()  # the zeros to come reach all parameters
                self.agree(state)
            with nullcontext() if last else self.no_sync():
                outcome = run_forward(state, self.plan, self.module, part)
                loss, *beside = (outcome,) if self.carrier is None else outcome
                add(loss.detach(), weight, last=last)
                if not index:
                    self._check_graph(loss, part)
                seed = backward_seed(loss, tally.share(weight), state.scaler)
                run_backward(loss, seed, self.trainable, (*beside,), tally.loads())

    def _go_anew(self, *way: Any) -> None:
        """The same from shards alone, whatever FSDP has done before, so that the way is the same."""
        cast("Sharded", self.module).begin_anew()
        for parameter in self.trainable:
            parameter.grad = None
        self._go(*way)

    def _report(self, loss: Tensor, weight: float, stop: bool, **extras: Any) -> Report:
        if self.plan.stops:
            extras["stop"] = stop
        return Report(loss=loss, weight=weight, extras=extras)

    def _check_graph(self, loss: Tensor, part: Any) -> None:
        """Refuse what a backward, or one through DDP, would not reach."""
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
        if self._unseen and part is not None:
            check_recomputed(loss)
            self._unseen.clear()

    def _take(self, state: DistState, weight: float, factor: float = 1.0) -> Grads:
        """The gradients of the optimizer's parameters, off the parameters, to be multiplied by `factor`."""
        tensors = tuple([parameter.grad for parameter in self.parameters])
        for tensor in tensors:
            if tensor is None and weight:
                self._check_reached()
                self._look_again(tensors)
                break
        for parameter in self.trainable:
            parameter.grad = None
        if state.scaler is None and factor == 1.0:
            return Grads(tensors)
        double = any(t is not None and t.dtype == torch.float64 for t in tensors)
        dtype = torch.float64 if double else torch.float32
        if state.scaler is None:
            return Grads(tensors, torch.tensor(factor, dtype=dtype))
        unscaling = state.scaler.scale.to(dtype).reciprocal()
        return Grads(tensors, unscaling if factor == 1.0 else unscaling * factor)

    def _look_again(self, tensors: Sequence[Tensor | None]) -> None:
        """Have the next graph looked at where others have no gradient than before: they may be hidden."""
        idle = [tensor is None for tensor in tensors]
        if idle != self._idle:
            self._idle[:], self._unseen[:] = idle, [True]

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
    return loss.new_full((), share)


def cloned(state: DistState, grads: Grads) -> Grads:
    """Gradients that the next backward does not overwrite: DDP's live in its buckets."""
    if state.world_size == 1:
        return grads
    return Grads(tuple([None if t is None else t.clone() for t in grads.tensors]), grads.factor)
