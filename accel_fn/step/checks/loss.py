"""Check of the reduction: a loss is compared with the mean, and the sum, of those of parts of its batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from accel_fn.base.batch import num_samples, tensors_of
from accel_fn.base.rng import is_same_random, random_state, restore_random
from accel_fn.base.samples import Samples
from accel_fn.base.split_batch import interleaved_parts, split_batch
from accel_fn.base.state import DistState, data_places
from accel_fn.base.torch_compile import uncompiled
from accel_fn.base.weights import Weight, count_labels, weigh
from accel_fn.comm import primitives
from accel_fn.comm.collectives import broadcast
from accel_fn.comm.differentiable import loss_of
from accel_fn.comm.gather import gather
from accel_fn.errors import AccelError, BatchError, LossError
from accel_fn.step.checks.warn import warn_user
from accel_fn.step.microbatches import splits_of
from accel_fn.step.plan import Plan
from accel_fn.step.strategy import Strategy

_NUM_SAMPLES = 8
_MOST_FAILURES = 10
_TOO_FEW = "no batch has had two samples"
_NO_PARTS = "all but one part of each batch weigh nothing, or a loss is not finite"
_EXACT = {torch.float64: (1e-8, 1e-12), torch.float32: (1e-4, 1e-5)}
_HALF = (2e-2, 1e-2)
"""Tolerances, relative and absolute, for sums in another order: by dtype, and for half precision."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A batch and its parts: losses, weights, and weights by the other `shift` of labels."""

    term: str
    """The name of the term that these are losses of; "" of a loss that is one number."""
    whole: float
    losses: Sequence[float]
    weights: Sequence[float]
    shifted: Sequence[float] | None

    def slack(self, tolerance: tuple[float, float]) -> float:
        """How far a sum in another order may be from the loss."""
        relative, least = tolerance
        return relative * max(map(abs, (self.whole, *self.losses))) + least


@dataclass(frozen=True, slots=True)
class Measured:
    """The losses of a few rows of one rank and of their parts, term by term."""

    cuts: Sequence[Cut]
    tolerance: tuple[float, float]
    twice: Sequence[Cut]
    """The loss of the same rows once more, at the end, as if it were a part."""
    draws: bool
    """Has the loss drawn from a global generator?"""
    calls_collectives: bool

    def fitting(self, cuts: Sequence[Cut]) -> set[str]:
        """The reductions by which the parts of each of these cuts give the loss of the batch."""
        found = {"mean", "sum", "shift"}
        for cut in cuts:
            means = _mean(cut.losses, cut.weights), _mean(cut.losses, cut.shifted)
            values = {"mean": means[0], "sum": sum(cut.losses), "shift": means[1]}
            slack = cut.slack(self.tolerance)
            found &= {
                name
                for name, value in values.items()
                if value is not None and abs(value - cut.whole) <= slack
            }
        return found

    def differing(self) -> Cut | None:
        """A term that is another one for the same batch, if there is one."""
        return next((each for each in self.twice if "sum" not in self.fitting([each])), None)


class LossCheck:
    """Compares the losses of a few batches with those of their parts."""

    def __init__(
        self, state: DistState, plan: Plan, strategy: Strategy, *, check_loss: bool
    ) -> None:
        self._plan = plan
        self._strategy = strategy
        self._is_on = check_loss and is_cut(state, plan)
        self._cuts_rows = all(map(_cuts_rows, plan.split))
        """Are batches cut along rows? A function of the user's may cut them so that its own parts agree."""
        self._num_failures = 0
        self._batches: list[int] = []
        """The batches whose parts agreed."""
        self._fitting = {"mean", "sum", "shift"}
        """The reductions that fitted all batches so far."""
        self.is_due = False
        """Is the next batch looked at, since this one could not be compared?"""
        self.verdict = "is not compared with those of its parts"
        """The result of the comparison, for `explain`."""
        if check_loss:
            self.verdict = (
                "is compared with those of its parts in the first step"
                if self._is_on
                else "is of whole batches alone, so it may be a mean or a sum"
            )

    def look(self, state: DistState, batch: Any, number: int) -> None:
        """Compare the loss of a batch with those of its parts, with one result on all ranks.

        Refuse a plan of another reduction. Warn of a loss that is neither, or that keeps state.
        """
        self.is_due = False
        if not self._is_on:
            return
        every = self._measured(state, batch)
        if isinstance(every, str):
            self._num_failures += 1
            self.is_due = self._num_failures < _MOST_FAILURES
            if not self._batches:
                self.verdict = f"could not be compared with those of its parts: {every}"
            return
        self._judge(state, every, number)

    def _measured(self, state: DistState, batch: Any) -> Sequence[Measured] | str:
        """The losses that ranks have found, on all ranks; or why there are none."""
        mine: Measured | str
        try:
            part, num_cuts = self._part(state, batch)
        except AccelError as error:  # the same on all ranks
            return f"its rows cannot be joined: {error}"
        if part is None:
            return _TOO_FEW
        try:
            mine = self._run(state, part, num_cuts)
        except Exception as error:  # if training raises it too, the step itself raises it
            self._strategy.reset()
            mine = f"{type(error).__name__} in a forward in evaluation mode"
        every = primitives.exchange(mine, state, "step")
        found = [each for each in every if isinstance(each, Measured)]
        failures = [each for each in every if isinstance(each, str)]
        if failures:
            return failures[0]
        return [each for each in found if each.cuts] or _NO_PARTS

    def _part(self, state: DistState, batch: Any) -> tuple[Any, int]:
        """A few samples for this rank, None where there are no two, and how often all ranks cut theirs."""
        whole, part, num_rows = self._counted(batch)
        # All ranks run as many forwards: FSDP unshards in each, and a loss may hold collectives.
        rows = primitives.exchange(num_rows, state, "step")
        if min(rows) < 0:
            return None, 0
        if max(rows) < 2:
            num_rows = sum(rows[data_places(state)])
            return (_joined(whole, state), _num_cuts(num_rows)) if num_rows > 1 else (None, 0)
        if min(rows) < 2:
            part = broadcast(part, state, source=[each > 1 for each in rows].index(True))
        return part, _num_cuts(min(each for each in rows if each > 1))

    def _counted(self, batch: Any) -> tuple[Any, Any, int]:
        """The batch, a few of its samples, and their number: 0 if unknown, -1 if the step will raise."""
        try:
            self._strategy.parameters.check()
        except Exception:
            return None, None, -1
        try:
            # Not by the plan's split, which the user may have written to be called once per batch.
            # A list is one batch, as torch's collate makes it of pairs, unless it holds micro-batches.
            is_window = bool(self._plan.having("takes_windows"))
            whole = batch[0] if is_window and type(batch) is list else batch
            num_rows = 0 if whole is None else num_samples(whole)
            part = split_batch(whole, max(1, num_rows // _NUM_SAMPLES))[0] if num_rows > 1 else None
            return whole, part, num_rows
        except Exception:  # the step refuses the batch, or its rows cannot be cut
            return None, None, 0

    def _run(self, state: DistState, part: Any, num_cuts: int) -> Measured:
        """Measure losses and weights of a batch and its parts, without a trace in the model."""
        plan, strategy = self._plan, self._strategy
        cuts = [split_batch(part, 2), interleaved_parts(part, 2), split_batch(part, 3)][:num_cuts]
        parts = [part, *[each for cut in cuts for each in cut], part]
        watch = _Watch()
        num_collectives = _num_collectives(state, plan)
        weight = (1,) * len(plan.terms) or 1
        losses, draws = [], False
        before = _Snapshot(plan.model, state)
        with torch.no_grad(), uncompiled(), loss_of(watch):
            for each in parts:
                try:
                    plan.model.eval()
                    loss = strategy.outputs(plan, state, each, weight)[0]
                    draws = draws or before.has_drawn()
                finally:
                    before.restore()
                losses.append(loss.reshape(-1).tolist())
        tolerance = _HALF if plan.forward_contexts else _EXACT.get(loss.dtype, _HALF)
        raw = _num_collectives(state, plan) != num_collectives
        return Measured(
            self._cuts(losses, cuts),
            tolerance,
            self._cut(losses[0], losses[-1:], [part]),
            draws,
            calls_collectives=watch.calls_collectives or raw,
        )

    def _cuts(self, losses: Sequence[Sequence[float]], cuts: Sequence[Sequence[Any]]) -> list[Cut]:
        """The cuts in which at least two parts have items, term by term."""
        whole, *others = losses
        found, start = [], 0
        for parts in cuts:
            own = others[start : start + len(parts)]
            start += len(parts)
            found += self._cut(whole, own, parts)
        return [each for each in found if len(each.losses) > 1 and isfinite(each.whole)]

    def _cut(
        self, whole: Sequence[float], losses: Sequence[Sequence[float]], parts: Sequence[Any]
    ) -> list[Cut]:
        """One cut, term by term, of the parts that have items; none where one of them is not finite."""
        plan, found = self._plan, []
        weights = weigh(plan.weight_fn, parts)
        shifted = _shifted(plan, parts)
        for place, term in enumerate(plan.terms or ("",)):
            rows = [
                (loss[place], _of_term(weight, place), _of_term(other, place))
                for loss, weight, other in zip(losses, weights, shifted or weights, strict=True)
            ]
            columns = list(zip(*[row for row in rows if row[1]], strict=True))
            if columns and all(map(isfinite, columns[0])):
                others = columns[2] if shifted else None
                found.append(Cut(term, whole[place], columns[0], columns[1], others))
        return found

    def _judge(self, state: DistState, every: Sequence[Measured], number: int) -> None:
        """Refuse the plan if another reduction fits, and the plan's does not; warn if none does."""
        declared = self._plan.reduction
        draws = any(each.draws for each in every)
        # Simulated ranks share the generators, so losses that draw may differ there.
        differing = [each.differing() for each in every]
        if not draws and any(differing):
            self._warn_of_state(state, next(filter(None, differing)))
            return
        here = set.intersection(*(each.fitting(each.cuts) for each in every))
        self._fitting &= here
        cut = every[0].cuts[0]
        if declared in here:
            self._batches.append(number)
            batches = _listed(self._batches)
            self.verdict = f"is a {declared} over the items of {batches}: those of its parts agree"
        elif declared == "mean" and "shift" in self._fitting:
            fitting = _other_shift(self._plan)
            raise LossError(
                "step: weight_fn must count the labels that the loss is a mean over, got num_labels(shift="
                f"{1 - fitting}) where shift={fitting} fits; use num_labels(..., shift={fitting}), or "
                "build(..., check_loss=False)"
            )
        elif other := [name for name in ("mean", "sum") if name in self._fitting]:
            raise LossError(
                f"step: loss_fn must return the {declared} over the batch's items, got a {other[0]}: "
                f"{cut.whole:.6g} for a batch, {_numbers(cut.losses)} for parts of {_numbers(cut.weights)} "
                f"items; use Plan(..., reduction={other[0]!r}), return the {declared}, or "
                "build(..., check_loss=False)"
            )
        elif draws:
            self._is_on = False
            self.verdict = "draws random numbers, so it cannot be compared with those of its parts"
        elif any(each.calls_collectives for each in every):
            self._is_on = False
            self.verdict = "is of the whole batch: it calls collectives"
        else:
            self._warn_of_neither(state, every, number)

    def _warn_of_neither(self, state: DistState, every: Sequence[Measured], number: int) -> None:
        self._is_on = False
        declared = self._plan.reduction
        cut = next(
            cut for each in every for cut in each.cuts if declared not in each.fitting([cut])
        )
        of_term = f"of the term {cut.term!r} " if cut.term else ""
        got = f"{of_term}parts give {_numbers(cut.losses)}, the batch {cut.whole:.6g}"
        self.verdict = f"is neither a mean nor a sum over the items of {_listed([number])}: {got}"
        if state.is_main and self._cuts_rows:
            warn_user(
                "step: loss_fn should return the mean over the items that weight_fn counts, of which ranks "
                f"and micro-batches compute their share, got one in batch {number} that is neither a mean "
                f"nor a sum: {got}; so the result depends on their number. Let weight_fn count what the "
                "loss divides by (num_labels(class_weight=) for class weights, a mapping for several "
                "terms), gather the rows of a loss over pairs, or build(..., check_loss=False)"
            )

    def _warn_of_state(self, state: DistState, cut: Cut) -> None:
        self._is_on = False
        got = f"{cut.whole:.6g}, then {cut.losses[0]:.6g}"
        self.verdict = f"differs from run to run: {got}"
        if state.is_main:
            warn_user(
                "step: loss_fn should return the same loss for the same batch, got "
                f"{got}: it keeps state, or draws from a generator of its own, and comparing the loss with "
                "those of its parts has moved that; use build(..., check_loss=False)"
            )


class _Watch:
    """Takes the place of the batch under training, to see whether its loss calls a collective."""

    num_microbatches = 1
    is_evenly_split = False
    is_exact_over_ranks = True
    calls_collectives = False


def _cuts_rows(split: Any) -> bool:
    return hasattr(split, "num_parts") or "num_parts" in getattr(split, "keywords", ())


def is_cut(state: DistState, plan: Plan) -> bool:
    """Is a batch computed in parts, over ranks or one after another?"""
    return state.world_size > 1 or bool(splits_of(plan) or plan.having("virtual_ranks"))


def _num_cuts(num_rows: int) -> int:
    """The number of cuts of so many rows: in halves, then in turn and in thirds of at least two rows each."""
    return 1 + (num_rows >= 4) + (num_rows >= 6)


def _num_collectives(state: DistState, plan: Plan) -> int:
    """The number of collectives in the group so far; 0 where sharding calls them in every forward."""
    if state.group is None or plan.having("shards"):
        return 0
    return int(state.group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def _joined(batch: Any, state: DistState) -> Any:
    """The rows of all ranks; a list that holds tensors is no row, unless it is marked by `samples`."""

    def is_column(node: Any) -> bool:
        return type(node) is Samples or (type(node) is list and not tensors_of(node))

    leaves, form = pytree.tree_flatten(batch, is_column)
    return pytree.tree_unflatten([*gather(tuple(leaves), state)], form)


def _of_term(weight: Weight, place: int) -> float:
    return weight[place] if isinstance(weight, tuple) else weight


def _mean(losses: Sequence[float], weights: Sequence[float] | None) -> float | None:
    """The mean of the losses of parts; None without weights, or if all are 0."""
    if weights is None or not sum(weights):
        return None
    return sum(loss * each for loss, each in zip(losses, weights, strict=True)) / sum(weights)


def _numbers(values: Sequence[float]) -> str:
    *first, last = [f"{value:.6g}" for value in values]
    return f"{', '.join(first)} and {last}"


def _listed(batches: Sequence[int]) -> str:
    *first, last = map(str, batches)
    return f"batches {', '.join(first)} and {last}" if first else f"batch {last}"


def _shifted(plan: Plan, parts: Sequence[Any]) -> Sequence[Weight] | None:
    """The weights that `num_labels` of the other shift gives; None without such labels."""
    weight_fn = plan.weight_fn
    if not isinstance(weight_fn, partial) or weight_fn.func is not count_labels:
        return None
    other = partial(count_labels, **{**weight_fn.keywords, "shift": _other_shift(plan)})
    try:
        return weigh(other, parts)
    except BatchError:  # one label a sample: no row has a first one
        return None


def _other_shift(plan: Plan) -> int:
    keywords = getattr(plan.weight_fn, "keywords", {})
    return 0 if keywords.get("shift") else 1


class _Snapshot:
    """Buffers and attributes of a model's modules, and the random generators, as they were."""

    def __init__(self, model: nn.Module, state: DistState) -> None:
        modules = list(model.modules())
        # Includes attributes such as caches and counters, unless they are written in place.
        self._attributes = [(module, dict(vars(module))) for module in modules]
        self._buffers = [(module, dict(module._buffers)) for module in modules]
        self._values = [(each, each.clone()) for each in model.buffers()]
        # No lock of `exclusive_random` here: simulated ranks would wait for each other's collectives.
        self._generators = random_state(state.device)
        self._device = state.device

    def has_drawn(self) -> bool:
        """Return whether a global generator has moved."""
        return not is_same_random(self._generators, random_state(self._device))

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for buffer, value in self._values:
                buffer.copy_(value)
        for module, attributes in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        restore_random(self._generators, self._device)
