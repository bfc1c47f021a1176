"""The loop of a step over its micro-batches, and `Strategy`: how ranks share the loop.

The base class `Strategy` is for one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import call
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accel_fn.core import primitives
from accel_fn.core.collectives import broadcast, exchange_failures
from accel_fn.core.counted_loss import CountedLoss, counts_refused
from accel_fn.core.dtensor import is_sharded, place_gradients, place_of
from accel_fn.core.given_batches import PLACES
from accel_fn.core.given_batches import place_of as place_of_batch
from accel_fn.core.grads import Grads, global_norm, half_of, wide_backward
from accel_fn.core.loss import (
    Outcome,
    counted_in,
    in_contexts,
    loss_module_of,
    placed,
    run_terms,
)
from accel_fn.core.mean import GlobalMean, Layout, seed_of
from accel_fn.core.microbatches import Parts, Weights, microbatches_or_failure
from accel_fn.core.observers import Observers
from accel_fn.core.parameters import Reached, TrainedParameters
from accel_fn.core.plan import Plan, describe_with_source, trained_by
from accel_fn.core.report import Report
from accel_fn.core.restored import main_buffers
from accel_fn.core.state import DistState, data_places, over
from accel_fn.core.torch_internals import run_backward
from accel_fn.core.update import Prepared, apply, prepare
from accel_fn.core.weights import Weight
from accel_fn.errors import (
    ArgumentTypeError,
    PeerOutOfMemoryError,
    message,
)

_NOTHING = nullcontext()


class Strategy:
    """Define how the ranks share one step. The class itself is one rank; subclasses override methods.

    A slot function `(state, module, plan) -> Strategy` in `plan.strategy` makes it. A subclass wraps the
    loss module, then calls `super().__init__`. Callers use its methods and never test its type.

    `gradients` is the loop: it weighs the batch, runs its micro-batches and takes the mean gradient.
    """

    finds_unused: bool = True
    """Whether a loss may leave parameters without a gradient."""
    pads: bool = False
    """Whether all ranks run the same number of micro-batches. A rank with fewer then also runs a
    micro-batch of another rank."""
    leaves_gradients: bool = True
    """Whether the backward leaves gradients in `.grad`. A DeepSpeed engine does not."""
    counts_first: bool = False
    """Whether the count of a loss `(sum, count)` must be known before its backward, for example
    because float16 cannot hold the sum."""
    mean_type: ClassVar[type[GlobalMean]] = GlobalMean
    """The class of a batch's mean. Its `share` computes the factor of each micro-batch's
    gradients."""

    def __init__(self, state: DistState, module: nn.Module, plan: Plan) -> None:
        self.module = module
        """The module that training calls; it maps a batch to `(loss, metrics)`."""
        self.loss_module = module
        """The module to call for a forward without gradients."""
        self.model = loss_module_of(module).model
        """The user's model, after placement."""
        self._is_alone = False
        """Whether the checks run trial passes on this rank, without averages over replicas."""
        self.retries = state.world_size > 1 and bool(plan.having("retries"))
        """Whether all ranks run the batch again if one of them runs out of memory."""
        left_out = {*map(id, plan.left_out())}
        self.in_graph = self.trainable()
        """The parameters that the graph of a loss may contain."""
        self.reachable = [each for each in self.in_graph if id(each) not in left_out]
        """The parameters in `in_graph` whose gradients a backward computes."""
        self.halves = half_of(self.reachable)
        """The parameters in half precision, whose gradients are summed over micro-batches in
        float32."""
        self._is_split = any(map(is_sharded, self.reachable))
        """Whether this rank computes with shards of parameters."""
        self._optimizers = [(each, trained_by(each)) for each in plan.optimizers.values()]
        self.trained = plan.trained()
        """The optimizers' parameters that require a gradient, in the order of the optimizers."""
        names = {id(each): name for name, each in plan.model.named_parameters()}
        self.owners = tuple([(names.get(id(each), ""), each) for each in self.trained])
        """Name and parameter of each entry of `trained`."""
        self._always = torch.ones((), dtype=torch.bool, device=state.device)
        """The value of `applied` in the report if every update is applied."""
        self.layout = Layout(
            loss_dtype(self.trained), is_sum=plan.reduction == "sum", terms=plan.terms
        )
        """The dtype of losses and metrics, and the metrics' names after the first batch with
        items."""
        self.layout.finish = plan.finish
        refused = counts_refused(state, plan)
        loss_module_of(module).refuses_counts = refused
        if refused:
            self.layout.counts = ()
        self.counts_first |= any(each.dtype == torch.float16 for each in self.reachable)
        self.layout.predicts = not (self.counts_first or self.retries)
        self.parameters = TrainedParameters(plan)
        self._settles = type(self).settle is not Strategy.settle
        self.awaits_total = False
        """Whether each rank waits for the weights of all ranks before its first forward. An error
        that one rank sends with its weight is then raised before any forward."""
        self.reached = Reached(
            plan, self.in_graph, finds_unused=self.finds_unused, is_main=state.is_main
        )
        self.observers = Observers(())
        """The observers of the step. `run` passes them the outcome of each micro-batch."""

    def trainable(self) -> Sequence[nn.Parameter]:
        """Return the parameters that the graph of a loss may contain."""
        return [each for each in self.module.parameters() if each.requires_grad]

    def gradients(
        self, plan: Plan, state: DistState, batch: Any
    ) -> tuple[DistState, Grads, Report]:
        """Compute the gradient of the exact mean over the global batch, and the report of the batch."""
        try:
            with self.sharing(state):
                mean, parts, weights = self._begin(plan, state, batch)
                self.run(plan, state, mean, parts, weights)
                self.average(state)
                loss, metrics, total = mean.close()
                grads = take_gradients(self, state, total)
        except BaseException as error:
            self.reset()
            self.parameters.explain(error)
            raise
        if mean.is_open and counted_in(metrics):
            grads = grads.scaled(mean.open_factor(metrics))
        if mean.correction != 1.0:
            grads = grads.scaled(mean.correction)
        extras, samples = mean.extras(plan), mean.samples
        report = self.layout.report(loss, total, samples=samples, metrics=metrics, extras=extras)
        return state, grads, report

    def _begin(self, plan: Plan, state: DistState, batch: Any) -> tuple[GlobalMean, Parts, Weights]:
        """Split and weigh the batch, and start the sum of the weights over the ranks."""
        for parameter in self.reachable:
            parameter.grad = None
        stop = False
        failed: Exception | None = None
        try:
            stop = any(map(call, plan.should_stop))
        except Exception as error:
            # Do not raise yet: like an error in the batch, this error must first reach the other
            # ranks.
            failed = error
        parts, weights, rows, failure = microbatches_or_failure(
            plan, batch, self.parameters.check, retries=self.retries
        )
        # Only the first batch of a pass has a place, so most steps skip the look-up.
        place = place_of_batch(batch) if PLACES.data else None
        mean = self.mean_type(
            state,
            weights,
            failed or failure,
            stop=stop,
            place=place,
            rows=rows,
            layout=self.layout,
        )
        if self.awaits_total:
            # If another rank has failed, raise now: a forward would change the running statistics
            # of this rank.
            mean.total()
        parts, weights = self.pad(state, mean, parts, weights)
        if not (any(weights) or (parts and self.pads)):
            # A rank without items still joins every collective, with one micro-batch of weight 0.
            parts, weights = (*parts, None), (*weights, ())
        return mean, parts, weights

    def run(
        self, plan: Plan, state: DistState, mean: GlobalMean, parts: Parts, weights: Weights
    ) -> None:
        """Run all forwards and backwards. Without retries, the last backward averages over the ranks."""
        every = [*zip(parts, weights, strict=True)]
        # With `retries`, a rank may run out of memory. So no backward averages gradients over the
        # ranks: `average` does, after the ranks have exchanged whether memory ran out.
        num_local = len(every) if self.retries else len(every) - 1
        backward = wide_backward(self.backward, self.halves, len(every))
        counted = self._counted(plan, state, mean, every)

        def run_one(part: Any, weight: Weight, *, sends: bool = False) -> None:
            outcome = self.outputs(plan, state, part, weight)
            if self.observers.of_outcomes:
                self.observers.on_outcome(part, outcome)
            loss, metrics, seed = (*outcome, None) if counted is None else counted(outcome, weight)
            if seed is None:
                seed = seed_of(loss, mean.share(weight), state.scaler)
            mean.add(loss.detach(), metrics, weight)
            if sends:
                mean.send()
            backward(loss, seed)

        if num_local:
            has_items = False
            with self.no_sync():
                for part, weight in every[:num_local]:
                    run_one(part, weight)
                    # Micro-batches of weight 0 come first. Zero their gradients before a
                    # micro-batch with items adds to them.
                    has_items = has_items or bool(weight)
                    if not has_items:
                        self.zero_gradients()
        if self.retries:
            self._vote(state, has_rows=parts[0] is not None)
        else:
            # The losses are summed over the ranks while the last backward runs.
            run_one(*every[-1], sends=not self._settles)
        if self.retries or self._settles:
            self.settle(state)
            mean.send()

    def _counted(
        self, plan: Plan, state: DistState, mean: GlobalMean, every: Sequence[tuple[Any, Weight]]
    ) -> CountedLoss | None:
        """Return the `CountedLoss` of a batch; None if the loss is known to be a mean."""
        if self.layout.counts == ():
            return None
        return CountedLoss(
            plan,
            state,
            mean,
            every,
            partial(self.outputs, plan, state),
            retries=self.retries,
            counts_first=self.counts_first,
        )

    def _vote(self, state: DistState, *, has_rows: bool) -> None:
        """Raise on every rank if memory ran out on one, before any rank averages gradients."""
        if has_rows:
            self.reached.check_reached()
        failures = exchange_failures(state, "")
        if any(failures):
            raise PeerOutOfMemoryError(failures)

    def outputs(self, plan: Plan, state: DistState, part: Any, weight: Weight) -> Outcome:
        """Return a micro-batch's loss and metrics. Without gradients, call `loss_module`."""
        shares = torch.is_grad_enabled() and not self._is_alone
        module = self.module if shares else self.loss_module
        outcome: Outcome
        # None means that this rank has no items.
        if part is None:
            outcome = module(None)
        elif self.layout.terms:
            outcome = run_terms(state, plan, module, part, weight)
        elif plan.forward_contexts:
            outcome = in_contexts(state, plan.forward_contexts, module, placed(state, plan, part))
        else:
            outcome = module(placed(state, plan, part))
        return outcome

    def can_run(self, plan: Plan, part: Any) -> bool:
        """Return whether the strategy can run this micro-batch; if not, a step with it raises an error."""
        return True

    def evaluating(
        self, plan: Plan, state: DistState, function: str
    ) -> AbstractContextManager[None]:
        """Return a context in which the model of every rank has the buffers of rank 0."""
        return _NOTHING if state.world_size == 1 else main_buffers(plan.model, state, function)

    def sharing(self, state: DistState) -> AbstractContextManager[Any]:
        """Return the context in which all forwards and backwards of a batch run."""
        return _NOTHING

    def pad(
        self, state: DistState, mean: GlobalMean | None, parts: Parts, weights: Weights
    ) -> tuple[Parts, Weights]:
        """Return the micro-batches to run, with extra ones if all ranks must run equally many."""
        return parts, weights

    def settle(self, state: DistState) -> None:
        """Compare the work of the ranks since `pad`; raise on all ranks if it differs."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context for all but the last micro-batch: gradients stay on this rank."""
        return _NOTHING

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Enter a context for trials of the checks: gradients are not averaged over replicas."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def backward(self, loss: Tensor, seed: Tensor | None) -> None:
        """Add the gradients of `seed * loss` to `.grad`; a seed of None means 1."""
        # Write only to the gradients of parameters that this step trains. In a GAN, the generator's
        # step then leaves `.grad` of the discriminator unchanged, so no step needs `zero_grad`.
        run_backward(loss, seed, self.reachable)

    def zero_gradients(self) -> None:
        """Zero the gradients of micro-batches of weight 0, which are nan if the loss was 0 / 0."""
        for parameter in self.reachable:
            if parameter.grad is not None:
                grad = parameter.grad
                (grad._values() if grad.is_sparse else grad).zero_()

    def average(self, state: DistState) -> None:
        """Average gradients over the ranks if the last backward has not; redistribute those of shards."""
        if self._is_split:
            place_gradients(self.reachable)

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the global L2 norm of gradients; an element on several ranks counts once."""
        return global_norm(tensors)

    def prepare(self, plan: Plan, state: DistState, grads: Grads, report: Report) -> Prepared:
        """Decide on the update and transform gradients; all collectives and checks of an update are here."""
        return prepare(plan, state, grads, report)

    def apply(self, plan: Plan, state: DistState, prepared: Prepared) -> tuple[DistState, Report]:
        """Run the optimizers and adjust the loss scale, without collectives."""
        weight = prepared.report.weight
        # Record the weight only now: a step that fails must change nothing.
        self.layout.last_total = (weight,) if weight and not isinstance(weight, Mapping) else ()
        return apply(plan, state, prepared, self._optimizers, self._always)

    def placements(self, tensors: Mapping[str, Tensor | None]) -> dict[str, tuple[int, ...]]:
        """Return, by name, the indices of the shard that this rank holds of each tensor.

        A whole tensor has () or no entry. The tensors are those of the model, or gradients under
        the names of their parameters.
        """
        return {name: place_of(each) for name, each in tensors.items() if each is not None}

    def compared_ranks(self, state: DistState) -> Sequence[int]:
        """Return the ranks whose tensors must equal this rank's if they hold the same shard.

        The ranks include this one. The first update compares gradients over these ranks, and
        `check_replicas` compares parameters. Either every rank has another one to compare with, or
        none has.
        """
        return range(state.world_size)

    def whole(self, *, writes: bool) -> AbstractContextManager[None]:
        """Return a context in which model and optimizers hold whole tensors, or DTensors.

        With `writes`, the strategy takes over the new values when the context ends. `save` and
        `load` run in it.
        """
        return _NOTHING

    def signature(self) -> Mapping[str, Any]:
        """Return the settings that determine the exact result. `load` refuses other settings."""
        return {}

    def reset(self) -> None:
        """Clean up after a step that failed."""


def forward(strategy: Strategy, plan: Plan, state: DistState, batch: Any) -> Tensor:
    """Return the mean loss over the global batch, [], without gradients or metrics."""
    parts, weights, _, failure = microbatches_or_failure(plan, batch)
    layout = strategy.layout.without_metrics()
    try:
        with torch.no_grad(), strategy.sharing(state):
            mean = strategy.mean_type(state, weights, failure, layout=layout, is_forward=True)
            parts, weights = strategy.pad(state, mean, parts, weights)
            for part, weight in zip(parts, weights, strict=True):
                loss, metrics = strategy.outputs(plan, state, part, weight)
                mean.add(loss, counted_in(metrics), weight)
            strategy.settle(state)
    except BaseException:
        strategy.reset()
        raise
    mean.send()
    return mean.loss()


def take_gradients(strategy: Strategy, state: DistState, weight: Weight) -> Grads:
    """Move the gradients from the parameters into `Grads`, with the factor that undoes the loss scale."""
    if not strategy.leaves_gradients:
        return Grads((None,) * len(strategy.trained))
    tensors = tuple([parameter.grad for parameter in strategy.trained])
    strategy.reached.check_gradients(tensors, bool(weight))
    for parameter in strategy.reachable:
        parameter.grad = None
    if state.scaler is None:
        return Grads(tensors, norm_fn=strategy.norm, owners=strategy.owners)
    is_double = any(each is not None and each.dtype == torch.float64 for each in tensors)
    dtype = torch.float64 if is_double else torch.float32
    factor = state.scaler.scale.to(dtype).reciprocal()
    return Grads(tensors, factor, norm_fn=strategy.norm, owners=strategy.owners)


class PaddingStrategy(Strategy):
    """A strategy in which every rank runs the same number of micro-batches."""

    pads = True

    def __init__(self, state: DistState, *args: Any, **options: Any) -> None:
        super().__init__(state, *args, **options)
        self.ranks = over(state)
        """The ranks that run the same number of micro-batches."""
        self.begin_pass: Callable[[bool, int], None] = _nothing
        """A function that `pad` calls. It gets a flag, whether gradients are computed, and the
        number of micro-batches that every rank will run."""

    def pad(
        self, state: DistState, mean: GlobalMean | None, parts: Parts, weights: Weights
    ) -> tuple[Parts, Weights]:
        """Add micro-batches, so that every rank runs the same number.

        A rank with fewer micro-batches, or with none that has a weight, runs a copy of another
        rank's micro-batch, with weight 0. The copy adds zeros to the gradient if its own gradient
        is finite.

        Cost: one small collective; a broadcast of a micro-batch if a rank needs one.
        """
        # All ranks must run the same modules in the same order, and only the loss of a real
        # micro-batch runs them. So a rank that lacks micro-batches gets a copy of a real one.
        ranks = self.ranks
        if ranks.world_size == 1:
            return parts, weights
        if mean is not None:
            # If one rank could not count its batch, all ranks raise here.
            mean.total()
            # Encode two facts of a rank in one number: how many micro-batches it has, and whether
            # one of them has a weight.
            found = mean.of_ranks[data_places(state)] if ranks.axis else mean.of_ranks
            counts = [2 * num + bool(weight) for weight, num in found]
        else:
            code = 2 * len(parts) + any(weights)
            counts = primitives.exchange_number(code, ranks, "step")
        # Prefer a rank with a weighted micro-batch: its loss is finite in a healthy run.
        source = max(range(len(counts)), key=lambda rank: (counts[rank] % 2, counts[rank]))
        most = max(counts) // 2
        self.begin_pass(torch.is_grad_enabled(), most)
        if min(counts) == 2 * most + counts[source] % 2:
            return parts, weights
        # Micro-batches with a weight come last, so send the last one.
        spare = parts[-1] if ranks.rank == source else None
        spare = broadcast(spare, ranks, source=source)
        return self.filled(parts, weights, spare, most)

    def filled(
        self, parts: Parts, weights: Weights, spare: Any, most: int
    ) -> tuple[Parts, Weights]:
        """Return `most` micro-batches: this rank's, then the spare one repeated, with weight 0."""
        if not any(weights):
            # The last backward sends its gradients to other ranks, and the loss of a micro-batch of
            # weight 0 may be 0 / 0. If all micro-batches of this rank have weight 0, drop one of
            # them if necessary, so that the spare one comes last.
            parts, weights = parts[: most - 1], weights[: most - 1]
        lacking = most - len(parts)
        return [*parts, *[spare] * lacking], [*weights, *[()] * lacking]


def _nothing(with_gradients: bool, num_microbatches: int) -> None:
    """Do nothing. This is the default of `PaddingStrategy.begin_pass`."""


def loss_dtype(trained: Sequence[nn.Parameter]) -> torch.dtype:
    """Return the dtype of sums of losses and metrics: float64 if a trained parameter has double precision."""
    wide = any(each.dtype in (torch.float64, torch.complex128) for each in trained)
    return torch.float64 if wide else torch.float32


def check_strategy(strategy: object) -> None:
    """Refuse a slot function's result that is not a Strategy."""
    if not isinstance(strategy, Strategy):
        rule = "return a Strategy"
        raise ArgumentTypeError(message("build", "strategy", rule, type(strategy).__name__))


def describe_backward(state: DistState, plan: Plan) -> str:
    """Describe what the backward of a plan averages over, and how, without building the plan."""
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
