"""Run the default checks of a step function: all of them on a few batches, cheap ones on the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accel_fn.checks.attributes import OptimizerAttributes
from accel_fn.checks.batch_norm import BatchNormCheck, OneRowCheck
from accel_fn.checks.comparison import Comparison
from accel_fn.checks.frozen import FrozenCheck
from accel_fn.checks.graph import GraphCheck
from accel_fn.checks.rows import RowsFound, RowsJudge, check_rows
from accel_fn.core import primitives
from accel_fn.core.batch import tensors_of
from accel_fn.core.collectives import all_or_none
from accel_fn.core.given_batches import place_of
from accel_fn.core.grads import Grads
from accel_fn.core.loop import Strategy
from accel_fn.core.loss import Outcome
from accel_fn.core.mesh_axes import ranks_along
from accel_fn.core.observers import Observer
from accel_fn.core.parameters import check_hooks, shares_gradients
from accel_fn.core.plan import Plan
from accel_fn.core.report import Report
from accel_fn.core.state import DistState, mesh_of
from accel_fn.core.warn import warn_user
from accel_fn.errors import BatchError
from accel_fn.parallel.same_on_all_ranks import check_same_gradients, fingerprints
from accel_fn.parallel.synced_batch_norm import SyncedStrategy

_LOOKS = (1, 2, 10, 100)
"""The numbers of the batches to check in full. Some faults appear only after the first batch: a
leaf that the second graph shares with the first one, or a loss whose halves agree at first."""

_MOST_NONE = 10
"""The number of first batches that may be None, because their samples could not be read."""


class FirstBatches(Observer):
    """Runs all checks on batches 1, 2, 10 and 100 of a step, and the cheap ones on other batches too."""

    def __init__(
        self, plan: Plan, strategy: Strategy, state: DistState, *, check_loss: bool = True
    ) -> None:
        self.comparison = Comparison(state, plan, strategy, check_loss=check_loss)
        self._batch_norm = BatchNormCheck(state, plan, strategy)
        self._one_row: OneRowCheck | None = None
        self._graph = GraphCheck(plan, strategy, state)
        self._frozen = FrozenCheck(plan) if plan.frozen and state.is_main else None
        self._attributes = OptimizerAttributes(plan) if state.is_main else None
        self._plan = plan
        self._model = plan.model
        self._strategy = strategy
        self._num_batches = 0
        self._num_none, self._is_none = 0, False
        """The number of batches that were None on this rank, and whether the current one is."""
        self._looks = False
        """Whether the current batch is checked in full."""
        self._has_warned = False
        """Whether this check has warned about a model in evaluation mode."""
        self._compares = state.world_size > 1
        """Whether the first update, at which gradients are compared over the ranks, is still to come."""
        self._repeated = RepeatedState()
        self._is_loaded = False
        """Whether a checkpoint was loaded since the last step."""
        self._rows, self._has_warned_of_rows = RowsJudge(), False

    def wants(self, state: DistState) -> bool:
        """Count this step, and return whether to check it."""
        self._num_batches = number = self._num_batches + 1
        self._looks = looks = number in _LOOKS or self.comparison.is_due
        is_repeated = self._repeated.is_due(state)
        return (
            looks
            or number <= _MOST_NONE
            or is_repeated
            or self._one_row is not None
            or self._compares
            or self._is_loaded
            or not (self._model.training or self._has_warned)
        )

    def before(self, state: DistState, batch: Any) -> None:
        """Check the model's mode; if the batch is checked in full, run all other checks too."""
        self._is_none = batch is None
        if self._is_loaded:
            self._is_loaded = False
            _check_place(state, batch)
        if not (self._model.training or self._has_warned):
            self._warn_of_evaluation_mode(state)
        if self._looks:
            self._look(state, batch)
        if self._one_row is not None:
            self._one_row.check(batch)

    def on_outcome(self, rows: Any, outcome: Outcome) -> None:
        """Check the graph of the loss."""
        if self._looks:
            self._graph.look(outcome[0], rows)

    def on_update(self, state: DistState, grads: Grads, report: Report) -> None:
        """Compare the gradients of the first update over the ranks."""
        if self._compares:
            check_same_gradients(self._strategy, state, self._plan, grads, report)
            self._compares = False

    def after(self, state: DistState, batch: Any, report: Report) -> None:
        """Warn about BatchNorm on parts of a batch, about None batches, and about a repeated state."""
        if self._batch_norm.is_due:
            self._batch_norm.end()
        self._repeated.end(state)
        if self._is_none:
            self._num_none, self._is_none = self._num_none + 1, False
            if self._num_none == self._num_batches == _MOST_NONE and state.is_main:
                _warn_of_nothing(report)

    def failed(self, state: DistState, error: BaseException) -> None:
        """Forget the state of a step that failed: a loop that retries passes it again."""
        self._repeated.forget()

    def saved(self, state: DistState, seconds: float, folder: Path) -> None:
        """Warn about attributes of optimizers that checkpoints do not hold."""
        if self._attributes is not None:
            self._attributes.warn()

    def loaded(self, state: DistState, seconds: float, folder: Path) -> None:
        """Record that the next batch must be checked: it should continue the loader's pass."""
        self._is_loaded = True

    def _warn_of_evaluation_mode(self, state: DistState) -> None:
        self._has_warned = True
        if state.is_main:
            warn_user(
                "step: model should be in training mode, got a "
                f"{type(self._model).__name__} in evaluation mode: dropout and batch statistics are off; "
                "call model.train() before the step"
            )

    def _look(self, state: DistState, batch: Any) -> None:
        # Check hooks whenever a batch is checked in full. A library that watches gradients often
        # adds its hooks on the main rank only. So exchange the error: otherwise the other ranks
        # would wait for the main rank.
        found = all_or_none(partial(self._check_rows_and_hooks, state, batch), state, "step")
        several = state.world_size > 1
        text = self._rows.judge(primitives.exchange(found, state, "step") if several else [found])
        if text and state.is_main and not self._has_warned_of_rows:
            self._has_warned_of_rows = True
            warn_user(text)
        has_copies = state.data.world_size < state.world_size
        if has_copies or (self._num_batches == 1 and state.world_size > 1):
            every = primitives.exchange(looks_of(batch), state, "step")
            check_copies("step", state, every)
            if self._num_batches == 1:
                warn_of_equal_batches("step", state, every)
        if self._frozen is not None:
            self._frozen.look()
        self.comparison.look(state, batch, self._num_batches, leaves_out=bool(text))
        if self.comparison.has_one_value_a_row and not isinstance(self._strategy, SyncedStrategy):
            self._one_row = OneRowCheck(state, self._plan)
            self._strategy.awaits_total = True
        self._graph.begin()
        self._batch_norm.begin()

    def _check_rows_and_hooks(self, state: DistState, batch: Any) -> RowsFound | None:
        """Refuse hooks of parameters; return the finding of `check_rows`."""
        if shares_gradients(state, self._plan) and self._strategy.leaves_gradients:
            check_hooks("step", self._plan)
        return check_rows(state, self._plan, batch)


class RepeatedState:
    """Warns once about a state that is passed to the step for the third time in a row."""

    def __init__(self) -> None:
        self._newest: DistState | None = None
        """The state that the last step began with."""
        self._is_repeated = self._has_warned = False
        self._num_repeats = 0

    def is_due(self, state: DistState) -> bool:
        """Record the state of a step; return whether the previous step began with the same one."""
        self._is_repeated = state is self._newest and not self._has_warned
        if not self._is_repeated:
            self._newest, self._num_repeats = state, 0
        return self._is_repeated

    def forget(self) -> None:
        """Forget the last state, because its step has failed."""
        self._newest = None

    def end(self, state: DistState) -> None:
        """Count a step that began with a repeated state and returned `state`; warn about the second one."""
        before = self._newest
        if not self._is_repeated or before is None:
            return
        # Do not count steps with `advance=False`: after one, `step` has not grown, and the next
        # step uses the same batch on purpose.
        self._num_repeats += state.step > before.step
        if self._num_repeats == 2:
            self._has_warned = True
            if state.is_main:
                warn_user(
                    "step: state should be the one that the last step returned, got the same one for the "
                    f"third time, at step {before.step}: schedules, random numbers and checkpoints count by "
                    "it; write state, report = step(state, batch)"
                )


def _check_place(state: DistState, batch: Any) -> None:
    """Warn if a run that continues after `load` begins with the very first batch of the loader."""
    is_first = state.step and not state.call and place_of(batch) == (0, 0)
    if is_first and state.is_main:
        warn_user(
            f"step: loader should go on after step {state.step}, got batch 0 of pass 0; put the "
            "loader into extras of save and load, and loop over range(loader.epoch, num_epochs), or "
            "over loader.epochs(num_epochs, since=state)"
        )


def _warn_of_nothing(report: Report) -> None:
    """Warn if no rank had a sample and called loss_fn, since loss_fn may need no batch."""
    weight = report.weight
    if not (any(weight.values()) if isinstance(weight, Mapping) else weight):
        warn_user(
            f"step: batch should hold samples, got None in the first {_MOST_NONE} steps, so loss_fn was not "
            "called; if it needs no batch, use () and a weight_fn"
        )


class Looks(NamedTuple):
    """A description of this rank's batch, for a comparison over ranks."""

    shapes: list[tuple[int, ...]]
    checksums: list[int]
    """The checksums of the batch's tensors; empty if one has a layout that cannot be summed."""
    is_known: bool = True
    """Whether the batch holds tensors or is None. A batch of another kind may not be countable."""


def looks_of(batch: Any) -> Looks:
    """Describe the rows of a batch, for a comparison over ranks."""
    mine: list[int] = []
    found = [*tensors_of(batch)]
    tensors = [each for each in found if each.numel()]
    if all(each.layout is torch.strided and not each.is_nested for each in tensors):
        mine = fingerprints([each.detach().contiguous() for each in tensors]) if tensors else []
    return Looks([tuple(each.shape) for each in tensors], mine, bool(found) or batch is None)


def warn_of_equal_batches(function: str, state: DistState, every: Sequence[Looks]) -> None:
    """Warn if all ranks have the same rows: each rank then does all the work."""
    is_whole = state.data.world_size > 1 and all(each == every[0] for each in every)
    if every[0].checksums and is_whole and state.is_main:
        warn_user(
            f"{function}: batch should be this rank's part of the global batch, got the same rows on "
            f"all {state.world_size} ranks, each of which does all the work; give the DataLoader to "
            "shard_loader, or cut the batch by part"
        )


def check_copies(function: str, state: DistState, every: Sequence[Looks]) -> None:
    """Raise on all ranks if two ranks with the same index along `dp` have different rows."""
    if not state.axes:
        return
    shape = mesh_of(state)
    firsts: dict[int, Looks] = {}
    for rank, looks in enumerate(every):
        place = ranks_along(shape, "dp", rank).index(rank)
        if looks.is_known and firsts.setdefault(place, looks) != looks:
            raise BatchError(
                f"{function}: batch must be the same on ranks that differ in other axes than dp, got other "
                f"rows on rank {rank}; give the DataLoader to shard_loader, or cut the batch by part, and "
                "seed random draws alike, by seed_samples or seed_all"
            )
