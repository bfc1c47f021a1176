"""A program is compared with itself, cut otherwise: a few rows of a batch, whole and in parts.

In this order: what is compared, how it is cut, who judges, what is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accel_fn.base.batch import num_samples, shapes_of, tensors_of
from accel_fn.base.mappings import opened
from accel_fn.base.origin import origin_of
from accel_fn.base.out_of_memory import is_memory
from accel_fn.base.samples import Samples
from accel_fn.base.split_batch import interleaved_parts, part_sizes, split_batch, split_rows
from accel_fn.base.state import DistState, data_places, over
from accel_fn.base.weights import Weight, count_labels, shares, total_weight, weigh
from accel_fn.comm import primitives
from accel_fn.comm.collectives import broadcast
from accel_fn.comm.dtensor import local
from accel_fn.comm.gather import gather
from accel_fn.errors import AccelError, BatchError, StateError
from accel_fn.step.checks.collated import Recollated
from accel_fn.step.checks.draws import CannotReplayError
from accel_fn.step.checks.findings import (
    Cut,
    Found,
    Gradients,
    Reads,
    Write,
    agree,
    loss_tolerance,
)
from accel_fn.step.checks.trial import Ran, Trial, couples
from accel_fn.step.checks.verdicts import Verdicts
from accel_fn.step.checks.writes import Written, are_close
from accel_fn.step.microbatches import in_microbatches
from accel_fn.step.plan import Plan
from accel_fn.step.same_on_all_ranks import fingerprints
from accel_fn.step.strategy import Strategy

_NUM_SAMPLES = 8
_MOST_FAILURES = 10
_TOO_FEW = "no batch has had two samples"
_NO_PARTS = "all but one part of each batch weigh nothing, or a loss is not finite"
_OF_LOOKS = (
    ("thirds", "in turn"),
    ("halves", "unequal"),
    ("in turn", "thirds"),
    ("unequal", "halves"),
)
"""The cuts of each look, in their order."""


class Comparison:
    """Compares a few rows of some batches with their parts: losses, metrics, gradients and writes."""

    def __init__(
        self, state: DistState, plan: Plan, strategy: Strategy, *, check_loss: bool
    ) -> None:
        self._plan = plan
        self._strategy = strategy
        self._is_on = check_loss and is_cut(state, plan)
        self._num_failures = self._num_looks = 0
        self.is_due = False
        """Is the next batch looked at, since this one could not be compared?"""
        self.has_one_value_a_row = False
        """Has one row no variance in a BatchNorm that trains? The same on all ranks."""
        self.verdicts = Verdicts(state, plan, is_on=check_loss, is_cut=self._is_on)

    @property
    def verdict(self) -> str:
        """The result, for `explain`."""
        return self.verdicts.text

    def look(self, state: DistState, batch: Any, number: int, *, leaves_out: bool = False) -> None:
        """Compare a batch with its parts, with one result on all ranks: refuse, or warn once.

        `leaves_out`: this rank has found already that rows of the batch are no samples, which any cut shows.
        """
        self.is_due = False
        if self._is_on and self.verdicts.sums:
            self._check_sums(state)
        if not (self._is_on and self.verdicts.is_open):
            return
        samples = collated_samples(self._plan, state, None if leaves_out else batch)
        of_samples = "" if samples is None else self._compared(state, samples)
        every = self._by_rows(state, batch, of_samples, leaves_out=leaves_out)
        if isinstance(every, str) and isinstance(of_samples, str):
            self._num_failures += 1
            self.is_due = self._num_failures < _MOST_FAILURES
            self.verdicts.not_compared(every)
            return
        self._num_looks += 1
        found = [each for some in (every, of_samples) if not isinstance(some, str) for each in some]
        self.has_one_value_a_row |= any(each.has_one_value_a_row for each in found)
        self.is_due = True  # after an error, too
        self.verdicts.judge(every, of_samples, number)
        self.is_due = False

    def _by_rows(
        self,
        state: DistState,
        batch: Any,
        of_samples: Sequence[Found] | str,
        *,
        leaves_out: bool,
    ) -> Sequence[Found] | str:
        """What ranks find in parts of the rows of a batch; or why they find nothing."""
        is_window = bool(self._plan.having("takes_windows")) and type(batch) is list
        self.verdicts.has_rows = not (is_window and any(type(each) is list for each in batch))
        if self._plan.having("takes_windows") and not isinstance(of_samples, str):
            return "micro-batches that a loader has collated are not cut"
        try:
            rows = _few_rows(self._plan, self._strategy, state, batch, leaves_out=leaves_out)
        except AccelError as error:  # the same on all ranks
            return f"its rows cannot be joined: {error}"
        return _TOO_FEW if rows is None else self._compared(state, rows)

    def _check_sums(self, state: DistState) -> None:
        """Warn of buffers that ranks have added up by their rows, and the loop has not over the ranks."""
        names, self.verdicts.sums = self.verdicts.sums, []
        buffers = dict(self._plan.model.named_buffers())
        found = [buffers[name].detach().contiguous() for name in names if name in buffers]
        every = primitives.exchange(fingerprints(found) if found else [], state, "step")
        if any(each != every[0] for each in every):
            self.verdicts.warn_of_writes(names)

    def _compared(self, state: DistState, rows: Rows) -> Sequence[Found] | str:
        """What all ranks have found; or why they have found nothing."""
        plan, strategy = self._plan, self._strategy
        names = _OF_LOOKS[self._num_looks % len(_OF_LOOKS)]
        cuts: list[Parts] = []
        failure = ""
        try:
            rows, cuts = _prepared(rows, names, most=1 if couples(plan, strategy) else 2)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}, where a few rows are cut or collated"
        # Else a rank without parts would leave others in a forward. In simulated ranks, which are threads,
        # one that collates seeds the generators that all have, and a forward would seem to draw.
        if couples(plan, strategy) or rows.collate is not None:
            failure = next(filter(None, primitives.exchange(failure, state, "step")), "")
        compare = partial(_compare, plan, strategy, state, rows, cuts, failure)
        every = _on_all_ranks(state, strategy, compare)
        if not isinstance(every, str) and any(each.calls_collectives for each in every):
            writes = [each.writes for each in every]
            narrow = any(each.has_one_value_a_row for each in every)
            dealt = _Deals(state, plan, strategy, rows)
            every = _on_all_ranks(state, strategy, dealt.compare)
            if not isinstance(every, str):
                pairs = zip(every, writes, strict=True)
                every = [
                    replace(each, writes=of_rank, has_one_value_a_row=narrow)
                    for each, of_rank in pairs
                ]
        if isinstance(every, str):
            return every
        joins = any(each.calls_collectives for each in every)
        return [each for each in every if each.cuts or joins] or _NO_PARTS


def is_cut(state: DistState, plan: Plan) -> bool:
    """Is a batch computed in parts, over ranks or one after another?"""
    return state.world_size > 1 or in_microbatches(plan)


def _on_all_ranks(
    state: DistState, strategy: Strategy, compare: Callable[[], Found]
) -> Sequence[Found] | str:
    """What `compare` finds on each rank; or why one of them has found nothing."""
    mine: Found | str
    lost: StateError | None = None
    try:
        mine = compare()
    except CannotReplayError as reason:
        mine = str(reason)
    except StateError as error:  # what it wrote could not be put back
        mine, lost = str(error), error
    except Exception as error:  # if training raises it too, the step itself raises it
        strategy.reset()
        what = "memory ran out" if is_memory(error) else f"{type(error).__name__}: {error}"
        mine = f"{what} in a forward or backward of a few rows"
    every = primitives.exchange((mine, lost is not None), state, "step")
    if any(is_lost for _, is_lost in every):
        if lost is not None:
            raise lost
        raise StateError(next(str(each) for each, is_lost in every if is_lost))
    failures = [each for each, _ in every if isinstance(each, str)]
    return failures[0] if failures else [each for each, _ in every if isinstance(each, Found)]


# What is compared


class Rows(NamedTuple):
    """A few rows of a batch, their number, and how many of them the rank with the fewest has."""

    batch: Any
    num: int
    fewest: int
    collate: Callable[[Sequence[int]], Any] | None = None
    """Makes the batch of some of them, where they are samples of a loader."""


def _few_rows(
    plan: Plan, strategy: Strategy, state: DistState, batch: Any, *, leaves_out: bool
) -> Rows | None:
    """A few rows for this rank; None on all ranks where there are no two, or where the step will raise."""
    whole, part, num = _counted(plan, strategy, batch)
    num = -1 if leaves_out else num
    # All ranks run as many forwards: FSDP unshards in each, and a loss may hold collectives.
    counts = primitives.exchange(num, state, "step")
    if min(counts) < 0:
        return None
    if max(counts) < 2:
        num = sum(counts[data_places(state)])
        return Rows(_joined(whole, state), num, num) if num > 1 else None
    if min(counts) < 2:
        source = [each > 1 for each in counts].index(True)
        part = broadcast(part, state, source=source)
        counts = [counts[source]]
    return Rows(part, num_samples(part), min(counts))


def _counted(plan: Plan, strategy: Strategy, batch: Any) -> tuple[Any, Any, int]:
    """The batch, a few of its samples, and their number: 0 if unknown, -1 if the step will raise."""
    try:
        strategy.parameters.check()
    except Exception:
        return None, None, -1
    try:
        # Not by the plan's split, which the user may have written to be called once per batch.
        # A list is one batch, as torch's collate makes it of pairs, unless it holds micro-batches.
        is_window = bool(plan.having("takes_windows"))
        whole = batch[0] if is_window and type(batch) is list else batch
        num = 0 if whole is None else num_samples(whole)
        if num < 2:
            return whole, None, num
        part = split_batch(whole, max(1, num // _NUM_SAMPLES))[0]
        return whole, part, num_samples(part)
    except Exception:  # the step refuses the batch, or its rows cannot be cut
        return None, None, 0


def halves_of(
    plan: Plan, strategy: Strategy, batch: Any
) -> tuple[Any, Sequence[Any], Sequence[Weight]] | None:
    """A few rows, their halves that weigh something, and the weights; None where there are no two."""
    _, rows, num = _counted(plan, strategy, batch)
    if num < 2:
        return None
    parts = split_batch(rows, 2)
    pairs = [each for each in zip(parts, weigh(plan.weight_fn, parts), strict=True) if each[1]]
    return (rows, *zip(*pairs, strict=True)) if len(pairs) > 1 else None


def _joined(batch: Any, state: DistState) -> Any:
    """The rows of all ranks; a list that holds tensors is no row, unless it is marked by `samples`."""

    def is_column(node: Any) -> bool:
        return type(node) is Samples or (type(node) is list and not tensors_of(node))

    leaves, form = pytree.tree_flatten(opened(batch, is_column), is_column)
    return pytree.tree_unflatten([*gather(tuple(leaves), state)], form)


def collated_samples(plan: Plan, state: DistState, batch: Any) -> Rows | None:
    """A few samples of this rank's part that its loader collates anew; None on all ranks without such."""
    is_window = bool(plan.having("takes_windows"))
    origin = origin_of(batch[0] if is_window and type(batch) is list and batch else batch)
    num = 0 if origin is None else min(origin.num_samples, _NUM_SAMPLES)
    fewest = min(primitives.exchange(num, state, "step"))
    if fewest < 2 or origin is None:
        return None
    found = Recollated(origin, state)
    return Rows(None, num, fewest, found)


# How it is cut


class Parts(NamedTuple):
    """A cut of rows: the parts, and which rows each has."""

    parts: Sequence[Any]
    rows: Sequence[Sequence[int]]


def _cut(rows: Rows, how: str) -> Parts:
    """Cut rows in halves, by every second row, in thirds, or a quarter off."""
    num = rows.num
    sizes = {
        "halves": part_sizes(num, 2),
        "in turn": part_sizes(num, 2),
        "thirds": part_sizes(num, 3),
        "unequal": [num - num // 4, num // 4],
    }[how]
    if how == "in turn":
        places: list[Sequence[int]] = [range(0, num, 2), range(1, num, 2)]
    else:
        stops = accumulate(sizes)
        places = [range(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    if rows.collate is not None:
        return Parts([rows.collate(each) for each in places], places)
    if how == "in turn":
        return Parts(interleaved_parts(rows.batch, 2), places)
    return Parts(split_rows(rows.batch, sizes), places)


def _cuts(rows: Rows, names: Sequence[str], *, most: int) -> list[Parts]:
    """These cuts, of which all ranks have as many."""
    least = {"halves": 2, "in turn": 3, "thirds": 6, "unequal": 4}
    found = [name for name in names if rows.fewest >= least[name]]
    # Of few rows, each second one may be right where halves are not.
    found = [*dict.fromkeys([*found, "halves"])]
    return [_cut(rows, name) for name in found[:most]]


class _Measure:
    """The runs of one rank over its own rows."""

    def __init__(self, plan: Plan, strategy: Strategy, trial: Trial) -> None:
        self._plan, self._trial = plan, trial
        self.couples = couples(plan, strategy)
        self._has_gradients = strategy.leaves_gradients
        self._scale: list[float] = []
        """For each parameter, the largest norm so far: gradients of rows may cancel each other."""

    def whole(self, rows: Rows, *, adds: bool = True, by_row: bool = False) -> Ran:
        """Run all rows; with `adds`, add their gradient."""
        (weight,) = weigh(self._plan.weight_fn, [rows.batch])
        weight = weight or (1,) * len(self._plan.terms) or 1
        # A forward alone may leave shards gathered.
        factor = self.nothing(weight) if not adds else shares(weight, weight)
        factor = factor if self._has_gradients else None
        drawn = (range(rows.num), rows.num) if by_row else None
        return self._trial.run(rows.batch, weight, factor, drawn=drawn)

    def nothing(self, weight: Weight) -> Weight | None:
        """The factor of a run that adds no gradient: of zeros, where ranks meet in forwards."""
        return _times(weight, 0.0) if self.couples and self._has_gradients else None

    def parts(self, cut: Parts, *, num: int = 0) -> tuple[list[Ran], list[Weight]]:
        """Run parts that weigh something, and take their shares of the gradient off.

        With `num`, each of so many rows has random numbers of its own.
        """
        weights = weigh(self._plan.weight_fn, cut.parts)
        total = total_weight(weights)
        ran = []
        for part, weight, rows in zip(cut.parts, weights, cut.rows, strict=True):
            factor, drawn = self.taken(weight, total), (rows, num) if num else None
            if weight:
                ran.append(self._trial.run(part, weight, factor, drawn=drawn))
                self._note_scale()
            elif self.couples:
                part, weight = self._spare(cut, weights)
                self._trial.run(part, weight, self.nothing(weight))  # other ranks run theirs
        return ran, [each for each in weights if each]

    def _spare(self, cut: Parts, weights: Sequence[Weight]) -> tuple[Any, Weight]:
        """A part in place of one that weighs nothing, whose loss may not be finite."""
        pairs = [*zip(cut.parts, weights, strict=True)]
        return next((each for each in pairs if each[1]), pairs[0])

    def taken(self, weight: Weight, total: Weight) -> Weight | None:
        """The factor by which a part is taken off."""
        if not self._has_gradients:
            return None
        if self._plan.reduction == "sum":
            return -1.0
        return shares(weight, total, -1)

    def gradients(self, run: Callable[[], None]) -> Gradients | None:
        """The norms of the gradient so far, and of what is left of it after `run`."""
        if not self._has_gradients:
            run()
            return None
        before = self._scale = self._trial.norms()
        run()
        return Gradients(before, self._scale, self._trial.norms())

    def _note_scale(self) -> None:
        if self._has_gradients:
            self._scale = [*map(max, self._scale, self._trial.norms())]


def _prepared(rows: Rows, names: Sequence[str], *, most: int) -> tuple[Rows, list[Parts]]:
    """A few rows, with their batch, and their cuts."""
    if rows.collate is not None:
        rows = rows._replace(batch=rows.collate(range(rows.num)))
    return rows, _cuts(rows, names, most=most)


def _compare(
    plan: Plan,
    strategy: Strategy,
    state: DistState,
    rows: Rows,
    cuts: Sequence[Parts],
    failure: str,
) -> Found:
    """Compare the rows of this rank with their parts."""
    if failure:
        raise CannotReplayError(failure)
    trial = Trial(plan, strategy, state)
    try:
        return _Looks(plan, strategy, state, trial, rows, cuts).found()
    finally:
        trial.close()


class _Looks:
    """What one rank finds in a few rows and their cuts."""

    def __init__(
        self,
        plan: Plan,
        strategy: Strategy,
        state: DistState,
        trial: Trial,
        rows: Rows,
        cuts: Sequence[Parts],
    ) -> None:
        self._plan, self._trial, self._rows, self._cuts = plan, trial, rows, cuts
        self._state = state
        self._owns_gradients = strategy.leaves_gradients
        self._measure = _Measure(plan, strategy, trial)

    def _agreed(self, flag: bool) -> bool:
        """Is it so on this rank? On any, where ranks meet in forwards, of which all must run as many."""
        if not self._measure.couples:
            return flag
        return any(primitives.exchange(flag, self._state, "step"))

    def found(self) -> Found:
        """Run everything."""
        measure, trial = self._measure, self._trial
        trial.draws.record(whole=True)
        first = measure.whole(self._rows)
        if trial.calls_collectives:
            return Found(
                calls_collectives=True,
                writes=self._writes_of_all(first),
                has_one_value_a_row=self._has_one_value_a_row(),
            )
        if self._agreed(trial.draws.has_any):
            first = self._with_same_draws()
        cuts, metrics, gradients, of_parts, last = self._against(first)
        tolerance = loss_tolerance(first.dtype, trial.dtypes())
        twice = _cut_of(self._plan, first.losses, [last], [self._rows.batch])
        by_row, unseen = self._by_row()
        if self._agreed(trial.is_half()) and self._rows.fewest > 2:
            rounding = self._of_two_rows()
            gradients = gradients and gradients.beside(rounding)
            by_row = by_row and (by_row[0], by_row[1] and by_row[1].beside(rounding))
        return Found(
            cuts,
            twice,
            tolerance,
            gradients,
            by_row,
            trial.dtypes(),
            {name: each for name, each in metrics.items() if not agree(each, tolerance)},
            self._writes(first, of_parts, tolerance),
            has_one_value_a_row=self._has_one_value_a_row(),
            unseen=unseen,
            denominators=self._denominators(tolerance),
        )

    def _of_two_rows(self) -> list[float]:
        """The norms of the gradient of two rows alone: those of many may cancel, rounding does not."""
        trial, rows = self._trial, self._rows
        two = (
            rows.collate(range(2)) if rows.collate else split_rows(rows.batch, [2, rows.num - 2])[0]
        )
        (weight,) = weigh(self._plan.weight_fn, [two])
        weight = weight or (1,) * len(self._plan.terms) or 1
        trial.forget()
        trial.run(two, weight, self._measure.taken(weight, weight))
        return trial.norms()

    def _has_one_value_a_row(self) -> bool:
        rows = {shape[0] for shape in shapes_of(self._rows.batch)}
        return rows == {self._trial.least_values}

    def _denominators(self, tolerance: tuple[float, float]) -> list[str]:
        """The numbers that a collate_fn makes, with which of all samples a part has another loss."""
        if self._rows.collate is None:
            return []
        part, weight = (self._weighing() or [(self._cuts[0].parts[0], 1)])[0]
        whole = _numbers_in(self._rows.batch)
        own = _numbers_in(part)
        # Ranks that meet in each forward run as many.
        names = [
            name
            for name, number in whole.items()
            if name in own and (self._measure.couples or not _is_same(own[name], number))
        ]
        if not names:
            return []
        alone = self._losses_of(part, weight)
        others = [self._losses_of(_with_number(part, name, whole[name]), weight) for name in names]
        pairs = zip(names, others, strict=True)
        return [name for name, found in pairs if _are_off(alone, found, tolerance)]

    def _losses_of(self, rows: Any, weight: Weight) -> list[float]:
        return self._trial.run(rows, weight, self._measure.nothing(weight)).losses

    def _with_same_draws(self) -> Ran:
        """Record what a part draws, and run the batch again with draws that are the same for every row."""
        trial = self._trial
        trial.draws.record(whole=False)
        part = self._cuts[0].parts[0]
        ones: Weight = (1,) * len(self._plan.terms) or 1
        trial.run(part, ones, self._measure.taken(ones, ones))
        trial.draws.check_alike()
        trial.forget()
        return self._measure.whole(self._rows)

    def _against(
        self, first: Ran
    ) -> tuple[list[Cut], dict[str, tuple[float, float]], Gradients | None, list[Ran], Ran]:
        """Take the parts of all cuts off the batch, which is run once more at the end."""
        measure, plan = self._measure, self._plan
        found: list[Cut] = []
        metrics: dict[str, tuple[float, float]] = {}
        of_parts: list[Ran] = []
        last = first

        def run() -> None:
            nonlocal last
            for cut in self._cuts:
                ran, weights = measure.parts(cut)
                of_parts.extend(ran if cut is self._cuts[0] else ())
                found.extend(_cut_of(plan, first.losses, ran, cut.parts))
                metrics.update(metrics_of(first, ran, weights))
            last = measure.whole(self._rows, adds=len(self._cuts) > 1)

        gradients = measure.gradients(run)
        return _finite(found), metrics, gradients, of_parts, last

    def _by_row(self) -> tuple[tuple[Sequence[Cut], Gradients | None] | None, str]:
        """The first cut again, where each row has random numbers of its own; or why it is not."""
        trial, cut, rows = self._trial, self._cuts[0], self._rows
        by_row = trial.draws.are_by_row(rows.num, len(cut.rows[0]))
        if not self._agreed(trial.draws.has_any):
            return None, "terms of training mode, under wrap_tp" if self._plan.shard_model else ""
        if self._agreed(not by_row):
            return None, "weights that are drawn"
        trial.forget()
        whole = self._measure.whole(rows, by_row=True)
        found: list[Cut] = []

        def run() -> None:
            ran, _ = self._measure.parts(cut, num=rows.num)
            found.extend(_cut_of(self._plan, whole.losses, ran, cut.parts))

        gradients = self._measure.gradients(run)
        return (_finite(found), gradients), ""

    def _writes(
        self, whole: Ran, of_parts: Sequence[Ran], tolerance: tuple[float, float]
    ) -> dict[str, Write]:
        """What the forward writes: by its rows, by their number of parts, and read by later forwards."""
        # An engine that owns gradients writes attributes of its own.
        has_any = any(each.written for each in (whole, *of_parts)) and self._owns_gradients
        if not self._agreed(has_any):
            return {}
        runs = [whole.written, of_parts[0].written, self._after_all_parts()]
        reads = self._reads(tolerance)
        return {
            name: Write(
                kind,
                of_parts=not _same(name, runs[0], runs[2]),
                of_rows=not _same(name, runs[0], runs[1]),
                reads=reads,
            )
            for name, kind in _kinds(runs).items()
        }

    def _writes_of_all(self, whole: Ran) -> dict[str, Write]:
        """The same of a loss that calls collectives: what it writes may be of the rows of all ranks."""
        if not whole.written:
            return {}
        chained, reads = self._after_all_parts(), self._reads((1e-8, 1e-12))
        tensors = {n: w.value for n, w in whole.written.items() if isinstance(w.value, Tensor)}
        bits = dict(zip(tensors, fingerprints([*tensors.values()]), strict=True)) if tensors else {}
        return {
            name: Write(
                kind, not _same(name, whole.written, chained), False, reads, bits.get(name, 0)
            )
            for name, kind in _kinds((whole.written, chained)).items()
        }

    def _weighing(self) -> list[tuple[Any, Weight]]:
        """The parts of the first cut that weigh something."""
        parts = self._cuts[0].parts
        weights = weigh(self._plan.weight_fn, parts)
        return [each for each in zip(parts, weights, strict=True) if each[1]]

    def _after_all_parts(self) -> Mapping[str, Written]:
        """What is written after all parts, one after the other."""
        *others, last = self._weighing()
        for each in others:
            self._keep(*each)
        return self._trial.run(*last, self._measure.nothing(last[1])).written

    def _keep(self, rows: Any, weight: Weight) -> None:
        self._trial.run(rows, weight, self._measure.nothing(weight), keeps_writes=True)

    def _reads(self, tolerance: tuple[float, float]) -> Reads:
        """Does a part give something else after another part: than alone, and than after the batch?"""
        first, *_, last = self._weighing()
        ones: Weight = (1,) * len(self._plan.terms) or 1
        return Reads(
            parts=self._differ(last, first, None, tolerance),
            rows=self._differ(last, first, (self._rows.batch, ones), tolerance),
        )

    def _differ(
        self,
        rows: tuple[Any, Weight],
        one: tuple[Any, Weight] | None,
        other: tuple[Any, Weight] | None,
        tolerance: tuple[float, float],
    ) -> bool:
        """Do rows give something else after one forward than after another, or after none?"""
        trial, measure = self._trial, self._measure
        taken = measure.taken(rows[1], rows[1])
        trial.forget()
        losses = []

        def run(before: tuple[Any, Weight] | None, factor: Weight | None) -> None:
            if before is not None:
                self._keep(*before)
            losses.append(trial.run(*rows, factor).losses)

        run(one, None if taken is None else _times(taken, -1.0))
        gradients = measure.gradients(lambda: run(other, taken))
        if _are_off(losses[0], losses[1], tolerance):
            return True
        if gradients is None:
            return False
        largest = max(gradients.whole, default=0.0)
        return max(gradients.rest, default=0.0) > tolerance[0] * largest


def _are_off(
    some: Sequence[float], others: Sequence[float], tolerance: tuple[float, float]
) -> bool:
    """Do losses of the same terms differ by more than rounding?"""
    relative, least = tolerance
    off = max(abs(a - b) for a, b in zip(some, others, strict=True))
    return off > relative * max(map(abs, some)) + least


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return not leaf.ndim and leaf.dtype is not torch.bool
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def _is_same(one: Any, other: Any) -> bool:
    return bool(one == other)


def _numbers_in(batch: Any) -> dict[str, Any]:
    """The numbers of a batch, 0-dim tensors among them, by name."""
    leaves, _ = pytree.tree_flatten_with_path(opened(batch))
    return {f"batch{pytree.keystr(path)}": leaf for path, leaf in leaves if _is_number(leaf)}


def _with_number(batch: Any, name: str, number: Any) -> Any:
    """Return a batch with another number of this name."""
    leaves, form = pytree.tree_flatten_with_path(opened(batch))
    found = [number if f"batch{pytree.keystr(path)}" == name else leaf for path, leaf in leaves]
    return pytree.tree_unflatten(found, form)


def _finite(cuts: Sequence[Cut]) -> list[Cut]:
    """The cuts in which at least two parts have items, of a loss that is finite."""
    return [each for each in cuts if len(each.losses) > 1 and isfinite(each.whole)]


def _kinds(runs: Sequence[Mapping[str, Written]]) -> dict[str, str]:
    """The kinds of all that runs have written, by name."""
    return {name: each.kind for run in runs for name, each in run.items()}


def _same(name: str, one: Mapping[str, Written], other: Mapping[str, Written]) -> bool:
    """Is what was written under a name the same?"""
    if name not in one or name not in other:
        return name not in one and name not in other
    return are_close(one[name].value, other[name].value)


def _cut_of(
    plan: Plan, whole: Sequence[float], ran: Sequence[Ran], parts: Sequence[Any]
) -> list[Cut]:
    """One cut, term by term, of the parts that have items; none where one of them is not finite."""
    found: list[Cut] = []
    weights = weigh(plan.weight_fn, parts)
    shifted = _shifted(plan, parts) or weights
    pairs = [each for each in zip(weights, shifted, strict=True) if each[0] or len(parts) == 1]
    for place, term in enumerate(plan.terms or ("",)):
        rows = [
            (each.losses[place], _of_term(weight, place), _of_term(other, place))
            for each, (weight, other) in zip(ran, pairs, strict=True)
        ]
        columns = list(zip(*[row for row in rows if row[1]], strict=True))
        if columns and all(map(isfinite, columns[0])):
            others = columns[2] if shifted is not weights else None
            found.append(Cut(term, whole[place], columns[0], columns[1], others))
    return found


def _of_term(weight: Weight, place: int) -> float:
    return weight[place] if isinstance(weight, tuple) else weight


def _shifted(plan: Plan, parts: Sequence[Any]) -> Sequence[Weight] | None:
    """The weights that `num_labels` of the other shift gives; None without such labels."""
    weight_fn = plan.weight_fn
    if not isinstance(weight_fn, partial) or weight_fn.func is not count_labels:
        return None
    other = 0 if weight_fn.keywords.get("shift") else 1
    try:
        return weigh(partial(count_labels, **{**weight_fn.keywords, "shift": other}), parts)
    except BatchError:  # one label a sample: no row has a first one
        return None


def metrics_of(
    whole: Ran, ran: Sequence[Ran], weights: Sequence[Weight]
) -> dict[str, tuple[float, float]]:
    """Metrics of the batch, and of its parts together, by name: where all are known and finite."""
    found = {}
    for name, value in whole.metrics.items():
        of_parts = [each.metrics.get(name, ()) for each in ran]
        if not value or any(len(each) != len(value) for each in of_parts):
            continue
        if len(value) == 2:
            sums = [sum(each) for each in zip(*of_parts, strict=True)]
            pair = _divided(*value), _divided(*sums)
        elif any(isinstance(each, tuple) for each in weights):
            continue  # beside terms, metrics are pairs
        else:
            total = sum(weights)  # type: ignore[arg-type]
            parts = zip(of_parts, weights, strict=True)
            pair = value[0], sum(each * w for (each,), w in parts) / total  # type: ignore[operator, misc]
        if all(map(isfinite, pair)):
            found[name] = pair
    return found


def _divided(total: float, count: float) -> float:
    return total / count if count else float("nan")


# Who judges a loss that calls collectives: the ranks together, who deal the same rows in two ways


class _Deals:
    """The rows of all ranks, dealt in a row, in turn, and with one row moved to another rank."""

    def __init__(self, state: DistState, plan: Plan, strategy: Strategy, rows: Rows) -> None:
        self._state, self._plan, self._strategy = state, plan, strategy
        self._ranks = over(state)
        self._rows = rows

    def compare(self) -> Found:
        """Run the deals, and compare losses and gradients over the ranks."""
        state, plan = self._state, self._plan
        batch = _joined(self._rows.batch, state)
        num, size = num_samples(batch), self._ranks.world_size
        sizes = part_sizes(num, size)
        # In micro-batches, a collective that a gradient goes through is refused.
        if size == 1 or sizes[-1] < 2 or plan.having("local_gradients") or in_microbatches(plan):
            return Found(calls_collectives=True)
        in_turn = interleaved_parts(batch, size)
        moved = split_rows(batch, [sizes[0] + 1, *sizes[1:-1], sizes[-1] - 1])
        trial = Trial(plan, self._strategy, state)
        try:
            return Found(
                in_turn=self._pair(trial, split_rows(batch, sizes), in_turn),
                moved=self._pair(trial, in_turn, moved),
                tolerance=loss_tolerance(torch.float64, trial.dtypes()),
                precisions=trial.dtypes(),
                calls_collectives=True,
            )
        finally:
            trial.close()

    def _pair(
        self, trial: Trial, one: Sequence[Any], other: Sequence[Any]
    ) -> tuple[Sequence[Cut], Gradients | None]:
        """Two deals of the same rows."""
        trial.forget()
        size = float(self._ranks.world_size)
        # FSDP's backward divides by the number of ranks; else gradients are added up afterwards, and those of
        # the second deal join the sum that all ranks have of the first.
        first = self._run(trial, one, size if self._averages else 1.0)
        self._sum_gradients()
        whole = trial.norms()
        second = self._run(trial, other, -size)
        self._sum_gradients(mean_over=self._ranks.world_size)
        terms = enumerate(self._plan.terms or ("",))
        cuts = [Cut(name, first[at], [second[at]], [1.0], None) for at, name in terms]
        leaves = self._strategy.leaves_gradients
        return cuts, Gradients(whole, whole, trial.norms()) if leaves else None

    def _run(self, trial: Trial, parts: Sequence[Any], factor: float) -> list[float]:
        """The loss of all ranks together, each with its share of the rows."""
        plan, ranks = self._plan, self._ranks
        mine = parts[ranks.rank]
        (weight,) = weigh(plan.weight_fn, [mine])
        total = total_weight(primitives.exchange(weight, ranks, "step"))
        share = (1.0 if weight else 0.0) if plan.reduction == "sum" else shares(weight, total)
        seed = _times(share, factor)
        ran = trial.run(mine, weight, seed if self._strategy.leaves_gradients else None)
        if trial.draws.has_any:
            raise CannotReplayError("it calls collectives, and draws random numbers")
        of_ranks = primitives.exchange((ran.losses, share), ranks, "step")
        return [
            sum(losses[place] * _of_term(each, place) for losses, each in of_ranks)
            for place in range(len(ran.losses))
        ]

    @property
    def _averages(self) -> bool:
        """Does a backward average gradients over the ranks by itself?"""
        return bool(self._plan.having("shards"))

    def _sum_gradients(self, mean_over: int = 1) -> None:
        """Add up over the ranks what a backward has left on each."""
        if self._averages:
            return
        for each in self._strategy.reachable:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
            if each.grad.is_sparse:
                each.grad = each.grad.to_dense()
        grads = [local(each.grad) for each in self._strategy.reachable if each.grad is not None]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for grad in grads:
            by_dtype.setdefault(grad.dtype, []).append(grad)
        for same in by_dtype.values():
            primitives.start_sums(same, self._ranks, "step").wait()
            torch._foreach_div_(same, mean_over)


def _times(share: Weight, factor: float) -> Weight:
    if isinstance(share, tuple):
        return tuple([each * factor for each in share])
    return share * factor
