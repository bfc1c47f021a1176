"""sync_batchnorm: in a step, BatchNorm layers use the statistics of the rows of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from accel_fn.core.loop import PaddingStrategy
from accel_fn.core.loss import Outcome, leave_out, loss_module_of
from accel_fn.core.microbatches import Parts, Weights
from accel_fn.core.plan import Plan, describe
from accel_fn.core.restored import with_forwards
from accel_fn.core.state import DistState, over
from accel_fn.core.weights import Weight
from accel_fn.errors import PlanError
from accel_fn.parallel.batch_norm import SyncedBatchNorm, batch_norms, has_own_forward


class _Spare(tuple[float, ...]):
    """The weight 0 of a spare micro-batch: its rows count only on the rank that it came from."""


_SPARE: Final = _Spare()


def check_synced(function: str, state: DistState, plan: Plan) -> None:
    """Refuse a plan that cannot be combined with BatchNorm statistics over all ranks."""
    if state.world_size == 1:
        return
    argument = f"{function}(sync_batchnorm)"
    for name, layer in batch_norms(plan.model).items():
        if has_own_forward(layer):
            raise PlanError(
                f"build: {argument} must have BatchNorm layers with torch's own forward, got {name}, a "
                f"{type(layer).__name__}; use torch's class, or GroupNorm"
            )
    for trait, rule, repair in (
        ("retries", 'accumulate("auto"), where a rank out of memory leaves', "give a number"),
        ("full_graph", "compiled(fullgraph=True), whose graph cannot hold", "leave that out"),
    ):
        if plan.having(trait):
            raise PlanError(
                f"build: {argument} must not be used with {rule} the collectives of its layers; {repair}"
            )
    if plan.shard_model:
        raise PlanError(
            f"build: {argument} must not be used with {describe(plan.shard_model[0])}, whose layers may hold "
            "parts of the features; leave it out"
        )


def is_synced(state: DistState, plan: Plan) -> bool:
    """Return whether the model has BatchNorm layers, and several ranks share a batch."""
    return state.data.world_size > 1 and bool(batch_norms(plan.model))


class SyncedStrategy(PaddingStrategy):
    """A base class to list before a strategy, whose BatchNorm layers then use the rows of all ranks."""

    # A rank without rows runs a micro-batch of another rank, to join the collectives of every
    # layer; these rows do not count. Without a forward, the rank would not know which layers come
    # next, and its backward would reduce gradients in another order than the backwards of its
    # peers.

    def __init__(
        self, state: DistState, module: nn.Module, plan: Plan, *args: Any, **options: Any
    ) -> None:
        super().__init__(state, module, plan, *args, **options)
        is_compiled = bool(plan.compile_loss)
        self._layers = SyncedBatchNorm(self.model, over(state), is_compiled=is_compiled)
        loss_module_of(self.module).joining = self._layers.nodes

    @contextmanager
    def sharing(self, state: DistState) -> Iterator[None]:
        """Sync the layers in the forward and in the backward, in which checkpoints run layers again."""
        try:
            with with_forwards(self._layers.forwards), super().sharing(state):
                yield
        finally:
            # Drop the nodes: they would keep the graph of the batch in memory.
            self._layers.nodes.clear()

    def filled(
        self, parts: Parts, weights: Weights, spare: Any, most: int
    ) -> tuple[Parts, Weights]:
        """Append copies of the spare micro-batch until there are `most` micro-batches."""
        lacking = most - len(parts)
        return [*parts, *[spare] * lacking], [*weights, *[_SPARE] * lacking]

    def outputs(self, plan: Plan, state: DistState, part: Any, weight: Weight) -> Outcome:
        """Return loss and metrics of one micro-batch."""
        layers = self._layers
        layers.counts = weight is not _SPARE
        layers.nodes.clear()
        loss, metrics = super().outputs(plan, state, part, weight)
        if not weight and torch.is_grad_enabled():
            # A loss of weight 0 may be 0 / 0, and the layers would send its NaN gradients to all
            # ranks. Drop the gradients between the loss and the layers. Rows of weight 0 still get
            # a gradient, through the statistics.
            leave_out([loss.grad_fn], layers.nodes)
        return loss, metrics

    def zero_gradients(self) -> None:
        """Do nothing: at weight 0, gradients come only from the statistics, and must be kept."""
