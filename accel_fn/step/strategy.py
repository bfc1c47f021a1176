"""Strategy: how the ranks share one step. `Strategy` itself is one rank; others override methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accel_fn.base.batch import count_samples
from accel_fn.base.given_batches import Place
from accel_fn.base.state import DistState
from accel_fn.base.weights import Weight
from accel_fn.comm.collectives import exchange_failures
from accel_fn.comm.dtensor import is_sharded, place_gradients, place_of
from accel_fn.errors import ArgumentTypeError, PeerOutOfMemoryError, message
from accel_fn.step import loop
from accel_fn.step.checks.graph import GraphChecks
from accel_fn.step.checks.parameters import TrainedParameters
from accel_fn.step.global_mean import GlobalMean
from accel_fn.step.grads import Grads, global_norm
from accel_fn.step.loss_module import Outcome, in_contexts, loss_module_of, placed, run_terms
from accel_fn.step.loss_terms import counted_in
from accel_fn.step.main_buffers import main_buffers
from accel_fn.step.metric_sums import Layout
from accel_fn.step.microbatches import Parts, Weights, microbatches_or_failure
from accel_fn.step.plan import Plan, describe_with_source, trained_by
from accel_fn.step.report import Report
from accel_fn.step.same_on_all_ranks import check_same_gradients
from accel_fn.step.torch_internals import run_backward
from accel_fn.step.update import Prepared, apply, prepare
from accel_fn.step.wide_sums import half_of

_NOTHING = nullcontext()


class Strategy:
    """Defines how the ranks share one step. Callers use its methods and never test its type.

    A slot function `(state, module, plan, inner) -> Strategy` in `plan.strategy` makes it. A
    subclass wraps the loss module, then calls `super().__init__`.
    """

    finds_unused: bool = True
    """May a loss leave parameters without a gradient?"""
    pads: bool = False
    """Does a rank with fewer micro-batches than others run some of theirs?"""
    settles: bool = False
    """Do ranks compare what they have run, before they add up losses?"""
    leaves_gradients: bool = True
    """Does its backward leave gradients in `.grad`?"""
    hooks_parameters: bool = False
    """Does it register hooks on parameters, beside which those of the user's are not found?"""
    counts_first: bool = False
    """Must the count of a loss be known before its backward, as where gradients are in float16?"""
    mean_type: ClassVar[type[GlobalMean]] = GlobalMean

    def __init__(
        self, state: DistState, module: nn.Module, plan: Plan, inner: Strategy | None = None
    ) -> None:
        self.module = module
        """Maps a batch to `(loss, metrics)`, as training runs it."""
        self.loss_module = module
        """The same, for a forward without gradients."""
        self.model = loss_module_of(module).model
        """The user's model, as it is placed."""
        self.inner = inner
        self._is_alone = False
        """Do forwards and backwards stay on this rank, as far as it holds all parameters?"""
        self.retries = state.world_size > 1 and bool(plan.having("retries"))
        """May a rank fail before gradients are averaged, and all do the batch again?"""
        self.reachable = self.trainable()
        """The parameters that a backward may reach."""
        self.halves = half_of(self.reachable)
        """Those in half precision, whose gradients are added up over micro-batches in float32."""
        self._is_split = any(map(is_sharded, self.reachable))
        """Does a rank hold parts of parameters, which it computes with?"""
        self._optimizers = [(each, trained_by(each)) for each in plan.optimizers.values()]
        self.trained = plan.trained()
        """The optimizers' parameters that require a gradient, in their order."""
        names = {id(each): name for name, each in plan.model.named_parameters()}
        self.owners = tuple([(names.get(id(each), ""), each) for each in self.trained])
        """Name and parameter of each of these."""
        self._always = torch.ones((), dtype=torch.bool, device=state.device)
        """Value of `applied` if no function decides about the update."""
        self._compares = state.world_size > 1
        """Are the gradients of the next update compared over the ranks? Those of the first are."""
        self.layout = Layout(
            loss_dtype(self.trained), is_sum=plan.reduction == "sum", terms=plan.terms
        )
        """Dtype of losses and metrics, and their names once a batch had items."""
        self.layout.finish = plan.finish
        refused = _counts_refused(state, plan)
        loss_module_of(module).refuses_counts = refused
        if refused:
            self.layout.counts = ()
        self.counts_first |= any(each.dtype == torch.float16 for each in self.reachable)
        self.parameters = TrainedParameters(plan)
        self.check_parts: Callable[[Parts], Exception | None] | None = None
        """Returns the error of micro-batches that must not run; None if nothing need be checked."""
        self.checks = GraphChecks(
            plan, self.reachable, finds_unused=self.finds_unused, is_main=state.is_main
        )

    def trainable(self) -> Sequence[nn.Parameter]:
        """The parameters that a backward may reach."""
        return [each for each in self.module.parameters() if each.requires_grad]

    def gradients(
        self, plan: Plan, state: DistState, batch: Any
    ) -> tuple[DistState, Grads, Report]:
        """Forward and backward of every micro-batch, to the exact mean over the global batch."""
        return loop.gradients(self, plan, state, batch)

    def run(
        self, plan: Plan, state: DistState, mean: GlobalMean, parts: Parts, weights: Weights
    ) -> None:
        """Forward and backward of these micro-batches; add their losses to the mean."""
        loop.run(self, plan, state, mean, parts, weights)

    def outputs(self, plan: Plan, state: DistState, part: Any, weight: Weight = 1) -> Outcome:
        """Loss and metrics of one micro-batch, not added up; without gradients no rank waits for others."""
        shares = torch.is_grad_enabled() and not self._is_alone
        module = self.module if shares else self.loss_module
        outcome: Outcome
        if part is None:  # this rank has no items
            outcome = module(None)
        elif self.layout.terms:
            outcome = run_terms(state, plan, module, part, weight)
        else:
            outcome = in_contexts(state, plan.forward_contexts, module, placed(state, plan, part))
        return outcome

    def forward(self, plan: Plan, state: DistState, batch: Any) -> Tensor:
        """The mean loss over the global batch, [], without gradients or metrics."""
        if plan.model.training:
            return self._forward(plan, state, batch)
        with self.evaluating(plan, state, "step.forward"):
            return self._forward(plan, state, batch)

    def evaluating(
        self, plan: Plan, state: DistState, function: str
    ) -> AbstractContextManager[None]:
        """A context in which the model of every rank is the one that rank 0 would save."""
        return _NOTHING if state.world_size == 1 else main_buffers(plan.model, state, function)

    def _forward(self, plan: Plan, state: DistState, batch: Any) -> Tensor:
        parts, weights, _, failure = microbatches_or_failure(plan, batch)
        mean = self.global_mean(state, weights, failure, is_forward=True)
        try:
            with torch.no_grad():
                parts, weights = self.pad(state, mean, parts, weights)
                for part, weight in zip(parts, weights, strict=True):
                    loss, metrics = self.outputs(plan, state, part, weight)
                    mean.add(loss, counted_in(metrics), weight)
                self.settle(state)
        except BaseException:
            self.reset()
            raise
        mean.send()
        return mean.loss()

    def global_mean(
        self,
        state: DistState,
        weights: Weights,
        failure: Exception | None,
        stop: bool = False,
        place: Place | None = None,
        rows: int = 0,
        *,
        is_forward: bool = False,
    ) -> GlobalMean:
        """Start the mean over the global batch; that of a forward alone has no metrics."""
        layout = self.layout.without_metrics() if is_forward else self.layout
        return self.mean_type(
            state,
            weights,
            failure,
            stop=stop,
            place=place,
            rows=rows,
            layout=layout,
            is_forward=is_forward,
        )

    def pad(
        self, state: DistState, mean: GlobalMean | None, parts: Parts, weights: Weights
    ) -> tuple[Parts, Weights]:
        """The micro-batches that this rank runs: more than its own if every rank must run as many."""
        return parts, weights

    def settle(self, state: DistState) -> None:
        """Return once all ranks have run the same since `pad`, or raise on all."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """A context whose backward leaves gradients on this rank: for all micro-batches but the last."""
        return _NOTHING

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A context for looks at a few rows: their gradients are not averaged over replicas."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def backward(self, loss: Tensor, seed: Tensor | None) -> None:
        """Add the gradients of `seed * loss` to `.grad`; a seed of None is one."""
        # Into these parameters alone: the generator's step of a GAN leaves `.grad` of the
        # discriminator as it is, so no `zero_grad` is needed anywhere.
        run_backward(loss, seed, self.reachable)

    def zero_gradients(self) -> None:
        """Keep zeros of what micro-batches of weight 0 have reached, whatever 0 times theirs is."""
        for parameter in self.reachable:
            if parameter.grad is not None:
                grad = parameter.grad
                (grad._values() if grad.is_sparse else grad).zero_()

    def vote(self, state: DistState, failure: str = "") -> None:
        """Raise on every rank if memory ran out on one, before any rank averages gradients."""
        failures = exchange_failures(state, failure)
        if any(failures):
            raise PeerOutOfMemoryError(failures)

    def average(self, state: DistState) -> None:
        """Average the gradients over the ranks, if the last backward has not done so."""
        if self._is_split:
            place_gradients(self.reachable)

    def take(self, state: DistState, weight: Weight) -> Grads:
        """Take the averaged gradients off the parameters."""
        return loop.take_gradients(self, state, weight)

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Global L2 norm of gradients, each element counted once over all ranks that hold a part."""
        return global_norm(tensors)

    def prepare(self, plan: Plan, state: DistState, grads: Grads, report: Report) -> Prepared:
        """Stage one of an update: every collective, and all that may raise. Changes nothing."""
        prepared = prepare(plan, state, grads, report)
        if self._compares:
            check_same_gradients(self, state, plan, prepared.grads, report)
            self._compares = False
        return prepared

    def apply(self, plan: Plan, state: DistState, prepared: Prepared) -> tuple[DistState, Report]:
        """Stage two of an update: optimizers and loss scale. Local writes alone."""
        return apply(plan, state, prepared, self._optimizers, self._always)

    def placements(self, tensors: Mapping[str, Tensor | None]) -> dict[str, tuple[int, ...]]:
        """Which part this rank holds of each tensor, by name: its indices, () or no entry if all of it.

        The tensors are those of the model, or gradients by the names of their parameters.
        """
        return {name: place_of(each) for name, each in tensors.items() if each is not None}

    def compared_ranks(self, state: DistState) -> Sequence[int]:
        """The ranks, this one among them, whose tensors must equal its own if they hold the same part.

        The first update compares gradients so, and `check_replicas` parameters. Every rank has others to
        be compared with, or none has.
        """
        return range(state.world_size)

    def whole(self, *, writes: bool) -> AbstractContextManager[None]:
        """A context in which model and optimizers hold whole tensors, or shards that know their place.

        With `writes`, what is in them at its end stays. `save` and `load` run in it.
        """
        return _NOTHING

    def check_offers(self, function: str) -> None:
        """Raise, on every rank, if a function of a step cannot be used: `step.grads`, `save`, ..."""

    def signature(self) -> Mapping[str, Any]:
        """Return the settings that decide the bits: a checkpoint refuses a step with others."""
        return {}

    def describe(self, state: DistState, plan: Plan) -> str:
        """The line of `explain` about the backward."""
        return describe_backward(state, plan)

    def reset(self) -> None:
        """Forget what a step that failed has left behind."""


def _counts_refused(state: DistState, plan: Plan) -> str:
    """Why a loss may return no sum and count in this plan; empty if it may."""
    what = "return the mean over the items that weight_fn counts, got (sum, count)"
    if plan.weight_fn is not count_samples:
        return f"{what} beside a weight_fn; leave weight_fn out"
    if plan.reduction == "sum":
        return f'{what} beside reduction="sum"; leave reduction out'
    if plan.having("local_gradients") and state.world_size > 1:
        return f"{what} under local_sgd, which averages ranks by their items; use wrap_ddp"
    if plan.compile_step:
        return f'{what} under compiled(scope="step"); use scope="loss"'
    return ""


def loss_dtype(trained: Sequence[nn.Parameter]) -> torch.dtype:
    """The dtype in which losses and metrics are added up: float64 if a trained parameter is."""
    wide = any(each.dtype in (torch.float64, torch.complex128) for each in trained)
    return torch.float64 if wide else torch.float32


def check_strategy(strategy: object) -> None:
    """Refuse what a slot function returned in place of a strategy."""
    if not isinstance(strategy, Strategy):
        rule = "return a Strategy"
        raise ArgumentTypeError(message("build", "strategy", rule, type(strategy).__name__))


def describe_backward(state: DistState, plan: Plan) -> str:
    """Over what the backward of a plan averages, and how; nothing is built."""
    calls = " and ".join(map(describe_with_source, plan.strategy))
    if plan.having("local_gradients") and state.world_size > 1:
        return f"the {plan.reduction} over the rank's own items, by {calls}"
    terms = f"sum of {len(plan.terms)} means" if plan.terms else plan.reduction
    mean = f"the {terms} over the global batch"
    if state.world_size > 1 or plan.having("acts_alone"):
        return f"{mean}, by {calls or 'nothing: build will refuse this'}"
    if not calls:
        return mean
    comma = "," if any(getattr(each, "source", "") for each in plan.strategy) else ""
    return f"{mean}; {calls}{comma} has nothing to do"
