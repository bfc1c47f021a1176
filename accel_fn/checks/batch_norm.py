"""Checks of BatchNorm, whose statistics depend on how a batch is cut."""

from __future__ import annotations

from typing import Any

from torch import nn

from accel_fn.core.batch import shapes_of
from accel_fn.core.loop import Strategy
from accel_fn.core.microbatches import cut, splits_of
from accel_fn.core.plan import Plan
from accel_fn.core.state import DistState
from accel_fn.core.warn import warn_user
from accel_fn.errors import BatchError
from accel_fn.parallel.batch_norm import batch_norms
from accel_fn.parallel.synced_batch_norm import SyncedStrategy


class BatchNormCheck:
    """Warns once about BatchNorm layers that use the statistics of a part of the batch."""

    def __init__(self, state: DistState, plan: Plan, strategy: Strategy) -> None:
        # Under local_sgd, ranks train separately, so only micro-batches count. Skip reproducible,
        # which uses the statistics of slices on purpose.
        is_shared = state.data.world_size > 1 and not plan.having("local_gradients")
        self._over_ranks = is_shared and not isinstance(strategy, SyncedStrategy)
        self._over_parts = bool(splits_of(plan))
        is_cut = self._over_ranks or self._over_parts
        is_on = is_cut and state.is_main and not plan.having("virtual_ranks")
        self._layers = batch_norms(plan.model) if is_on else {}
        self._before: dict[str, int | None] = {}
        """For each layer that uses statistics of its rows, the number of batches that it has
        processed."""
        self.is_due = False
        """Whether the current step is watched, because a layer uses statistics of its rows."""

    def begin(self) -> None:
        """Record, before a step, which layers use statistics of their rows."""
        self._before = {n: _num_seen(each) for n, each in self._layers.items() if _trains(each)}
        self.is_due = bool(self._before)

    def end(self) -> None:
        """Warn about the layers that the step has called, and those that do not count their batches."""
        self.is_due = False
        names = [
            name
            for name, before in self._before.items()
            if before is None or before != _num_seen(self._layers[name])
        ]
        if not self._over_parts:
            # Leave out torch's own SyncBatchNorm: on accelerators, it computes statistics over all
            # ranks.
            names = [each for each in names if not isinstance(self._layers[each], nn.SyncBatchNorm)]
        if names:
            self._layers = {}
            self._warn(names)

    def _warn(self, names: list[str]) -> None:
        cuts = ["micro-batch"] * self._over_parts + ["rank"] * self._over_ranks
        # Name the ranks too: on another number of ranks, a micro-batch has other rows, even with
        # sync_batchnorm.
        depends = "numbers of micro-batches and ranks" if self._over_parts else "number of ranks"
        sync = "wrap_ddp(sync_batchnorm=True) or wrap_fsdp(sync_batchnorm=True), "
        if self._over_parts:
            sync = f"no accumulate, and {sync}" if self._over_ranks else ""
        more = ", ..." if len(names) > 3 else ""
        warn_user(
            "step: model should have no BatchNorm in training mode where a batch is cut, got "
            f"{', '.join(names[:3])}{more} with statistics of the rows of each {' and '.join(cuts)}, so the "
            f"result depends on the {depends}; use {sync}GroupNorm, or freeze it by eval()"
        )


class OneRowCheck:
    """Refuses a micro-batch of one row, for which a BatchNorm in training has no variance.

    torch would raise in the forward, on one rank only, and the other ranks would wait for it.
    """

    def __init__(self, state: DistState, plan: Plan) -> None:
        self._plan = plan
        is_over_ranks = state.data.world_size > 1
        # Leave out torch's own SyncBatchNorm: on accelerators, it computes statistics over all
        # ranks.
        synced = nn.SyncBatchNorm if is_over_ranks and state.device.type != "cpu" else ()
        layers = batch_norms(plan.model).items()
        self._layers = {name: each for name, each in layers if not isinstance(each, synced)}
        sync = "wrap_ddp(sync_batchnorm=True) or wrap_fsdp(sync_batchnorm=True)"
        repairs = [sync] * is_over_ranks + ["fewer micro-batches"] * bool(splits_of(plan))
        self._repair = f"{', '.join(repairs)}, or drop_last=True in the DataLoader"
        self._rank = state.rank

    def check(self, batch: Any) -> None:
        """Refuse this rank's batch if one of its micro-batches has a single row."""
        parts, _ = cut(self._plan, batch)
        if all({shape[0] for shape in shapes_of(part)} != {1} for part in parts):
            return
        names = [name for name, each in self._layers.items() if _trains(each)]
        if not names:
            return
        more = ", ..." if len(names) > 3 else ""
        raise BatchError(
            "step: batch must have two rows or more in each micro-batch, of which BatchNorm in training mode "
            f"({', '.join(names[:3])}{more}) computes the variance, got 1 on rank {self._rank}; use "
            f"{self._repair}"
        )


def _trains(layer: Any) -> bool:
    """Return whether a layer normalizes by the statistics of its rows."""
    trains: bool = layer.training or layer.running_mean is None
    return trains


def _num_seen(layer: Any) -> int | None:
    """Return the layer's count of batches in training mode; None if it does not count them."""
    counter = layer.num_batches_tracked if layer.training else None
    return None if counter is None else int(counter)
