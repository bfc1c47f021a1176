"""Run a few rows and their parts on one rank, and compare the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accel_fn.checks.draws import CannotReplayError
from accel_fn.checks.findings import (
    Cut,
    Found,
    Gradients,
    Reads,
    Write,
    agree,
    loss_tolerance,
)
from accel_fn.checks.parts import (
    Parts,
    Rows,
)
from accel_fn.checks.trial import Ran, Trial, couples
from accel_fn.checks.writes import Written, are_close
from accel_fn.core import primitives
from accel_fn.core.batch import opened, shapes_of
from accel_fn.core.loop import Strategy
from accel_fn.core.plan import Plan
from accel_fn.core.split_batch import split_rows
from accel_fn.core.state import DistState
from accel_fn.core.weights import Weight, labels_at, shares, total_weight, weigh
from accel_fn.errors import BatchError
from accel_fn.parallel.same_on_all_ranks import fingerprints


def compare(
    plan: Plan,
    strategy: Strategy,
    state: DistState,
    rows: Rows,
    cuts: Sequence[Parts],
    failure: str,
) -> Found:
    """Compare the rows of this rank with their parts; raise if `failure` is not empty."""
    if failure:
        raise CannotReplayError(failure)
    trial = Trial(plan, strategy, state)
    try:
        return _Looks(plan, strategy, state, trial, rows, cuts).found()
    finally:
        trial.close()


class _Measure:
    """Runs rows and their parts on one rank, and measures their gradients."""

    def __init__(self, plan: Plan, strategy: Strategy, trial: Trial) -> None:
        self._plan, self._trial = plan, trial
        self.couples = couples(plan, strategy)
        self._has_gradients = strategy.leaves_gradients
        self._scale: list[float] = []
        """The largest norm so far per parameter: gradients of rows may cancel each other."""

    def whole(self, rows: Rows, *, adds: bool = True, by_row: bool = False) -> Ran:
        """Run all rows; with `adds`, add the gradient of their loss to `.grad`."""
        (weight,) = weigh(self._plan.weight_fn, [rows.batch])
        weight = weight or ones_of(self._plan)
        # If forwards have collectives, a forward without a backward may leave parameters unsharded.
        # So without `adds`, `nothing` returns a factor of 0 for a backward.
        factor = self.nothing(weight) if not adds else shares(weight, weight)
        factor = factor if self._has_gradients else None
        drawn = (range(rows.num), rows.num) if by_row else None
        return self._trial.run(rows.batch, weight, factor, drawn=drawn)

    def nothing(self, weight: Weight) -> Weight | None:
        """Return the factor of a run that adds no gradient.

        The factor is 0 if forwards have collectives, so that the run has a backward. Otherwise, the
        factor is None.
        """
        return times(weight, 0.0) if self.couples and self._has_gradients else None

    def parts(self, cut: Parts, *, num: int = 0) -> tuple[list[Ran], list[Weight]]:
        """Run the parts that have a weight, and subtract their shares of the gradient.

        With `num`, each of `num` rows has separate random numbers.
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
                # Other ranks may run a part now, and forwards have collectives. So run a part on
                # this rank too.
                self._trial.run(part, weight, self.nothing(weight))
        return ran, [each for each in weights if each]

    def _spare(self, cut: Parts, weights: Sequence[Weight]) -> tuple[Any, Weight]:
        """Return a part with a weight if there is one, since the loss of a part without items may be NaN."""
        pairs = [*zip(cut.parts, weights, strict=True)]
        return next((each for each in pairs if each[1]), pairs[0])

    def taken(self, weight: Weight, total: Weight) -> Weight | None:
        """Return the factor by which a run subtracts the gradient of a part from `.grad`."""
        if not self._has_gradients:
            return None
        if self._plan.reduction == "sum" or self._trial.is_counted:
            return (-1.0,)
        return shares(weight, total, -1)

    def gradients(self, run: Callable[[], None]) -> Gradients | None:
        """Call `run`; return the gradient norms before it, the largest ones during it, and those after it."""
        if not self._has_gradients:
            run()
            return None
        before = self._scale = self._trial.norms()
        run()
        return Gradients(before, self._scale, self._trial.norms())

    def _note_scale(self) -> None:
        if self._has_gradients:
            self._scale = [*map(max, self._scale, self._trial.norms())]


class _Looks:
    """Finds out how the results of a few rows depend on their cuts, on one rank."""

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
        """Return the flag; if forwards have collectives, return whether the flag is set on any rank.

        All ranks must then run the same number of forwards.
        """
        if not self._measure.couples:
            return flag
        return any(primitives.exchange(flag, self._state, "step"))

    def found(self) -> Found:
        """Run all comparisons, and return their findings."""
        measure, trial = self._measure, self._trial
        trial.draws.record(whole=True)
        first = measure.whole(self._rows)
        if trial.calls_collectives:
            return Found(
                calls_collectives=True,
                is_counted=trial.is_counted,
                writes=self._writes_of_all(first),
                has_one_value_a_row=self._has_one_value_a_row(),
            )
        if self._agreed(trial.draws.has_any):
            first = self._with_same_draws()
        cuts, metrics, gradients, of_parts, last = self._against(first)
        tolerance = loss_tolerance(first.dtype, trial.dtypes())
        cuts = _finite(cuts, tolerance)
        twice = _cut_of(self._plan, first.losses, [last], [self._rows.batch])
        by_row, unseen = self._by_row(tolerance)
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
            is_counted=trial.is_counted,
        )

    def _of_two_rows(self) -> list[float]:
        """Return the gradient norms of two rows, since the gradients of many rows may cancel."""
        trial, rows = self._trial, self._rows
        two = (
            rows.collate(range(2)) if rows.collate else split_rows(rows.batch, [2, rows.num - 2])[0]
        )
        (weight,) = weigh(self._plan.weight_fn, [two])
        weight = weight or ones_of(self._plan)
        trial.forget()
        trial.run(two, weight, self._measure.taken(weight, weight))
        return trial.norms()

    def _has_one_value_a_row(self) -> bool:
        rows = {shape[0] for shape in shapes_of(self._rows.batch)}
        return rows == {self._trial.least_values}

    def _denominators(self, tolerance: tuple[float, float]) -> list[str]:
        """Return the names of the numbers from collate_fn that change the loss of a part.

        For each number, compare the loss of the part with the loss of the same part that holds the
        number of the whole batch.
        """
        if self._rows.collate is None:
            return []
        part, weight = (self._weighing() or [(self._cuts[0].parts[0], ones_of(self._plan))])[0]
        whole = _numbers_in(self._rows.batch)
        own = _numbers_in(part)
        # If forwards have collectives, all ranks must run the same number of forwards. So try every
        # number, even one that is equal in the part and in the batch.
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
        """Record the draws of a part, then run the batch with these draws, equal for every row."""
        trial = self._trial
        trial.draws.record(whole=False)
        part = self._cuts[0].parts[0]
        ones = ones_of(self._plan)
        trial.run(part, ones, self._measure.taken(ones, ones))
        trial.draws.check_alike()
        trial.forget()
        return self._measure.whole(self._rows)

    def _against(
        self, first: Ran
    ) -> tuple[list[Cut], dict[str, tuple[float, float]], Gradients | None, list[Ran], Ran]:
        """Run the parts of each cut, subtracting their gradients, and then the batch once more."""
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
        return found, metrics, gradients, of_parts, last

    def _by_row(
        self, tolerance: tuple[float, float]
    ) -> tuple[tuple[Sequence[Cut], Gradients | None] | None, str]:
        """Run the first cut with separate random numbers for each row, or return the reason against it."""
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
        return (_finite(found, tolerance), gradients), ""

    def _writes(
        self, whole: Ran, of_parts: Sequence[Ran], tolerance: tuple[float, float]
    ) -> dict[str, Write]:
        """Describe the values that forwards write: whether they depend on rows or cuts, and are read."""
        # Skip a strategy whose engine keeps the gradients: the engine itself writes to attributes.
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
        """Describe the values that a forward with collectives writes; they may depend on all ranks' rows."""
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
        """Return the parts of the first cut that have a weight."""
        parts = self._cuts[0].parts
        weights = weigh(self._plan.weight_fn, parts)
        return [each for each in zip(parts, weights, strict=True) if each[1]]

    def _after_all_parts(self) -> Mapping[str, Written]:
        """Return the written values after all parts have run, one after the other."""
        *others, last = self._weighing()
        for each in others:
            self._keep(*each)
        return self._trial.run(*last, self._measure.nothing(last[1])).written

    def _keep(self, rows: Any, weight: Weight) -> None:
        self._trial.run(rows, weight, self._measure.nothing(weight), keeps_writes=True)

    def _reads(self, tolerance: tuple[float, float]) -> Reads:
        """Return whether the results of a part depend on the forward that runs before it.

        Compare a run after another part with a run after no forward, and with a run after the
        batch.
        """
        first, *_, last = self._weighing()
        ones = ones_of(self._plan)
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
        """Return whether the results of `rows` differ between a run after `one` and a run after `other`."""
        trial, measure = self._trial, self._measure
        taken = measure.taken(rows[1], rows[1])
        trial.forget()
        losses = []

        def run(before: tuple[Any, Weight] | None, factor: Weight | None) -> None:
            if before is not None:
                self._keep(*before)
            losses.append(trial.run(*rows, factor).losses)

        run(one, None if taken is None else times(taken, -1.0))
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
    """Return whether two losses, term by term, differ by more than rounding."""
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
    """Return the numbers of a batch by name, including 0-dim tensors."""
    leaves, _ = pytree.tree_flatten_with_path(opened(batch))
    return {f"batch{pytree.keystr(path)}": leaf for path, leaf in leaves if _is_number(leaf)}


def _with_number(batch: Any, name: str, number: Any) -> Any:
    """Return a copy of a batch with another number under this name."""
    leaves, form = pytree.tree_flatten_with_path(opened(batch))
    found = [number if f"batch{pytree.keystr(path)}" == name else leaf for path, leaf in leaves]
    return pytree.tree_unflatten(found, form)


def _finite(cuts: Sequence[Cut], tolerance: tuple[float, float]) -> list[Cut]:
    """Select the cuts whose losses can be compared.

    The loss of the batch must be finite, and two parts or more must have items. If only one part
    has items, its loss must differ from that of the batch: equal losses would fit both a mean and a
    sum.
    """
    return [
        each
        for each in cuts
        if isfinite(each.whole) and (len(each.losses) > 1 or not each.fits(tolerance))
    ]


def _kinds(runs: Sequence[Mapping[str, Written]]) -> dict[str, str]:
    """Return the kind of each value that one of these runs has written, by name."""
    return {name: each.kind for run in runs for name, each in run.items()}


def _same(name: str, one: Mapping[str, Written], other: Mapping[str, Written]) -> bool:
    """Return whether two runs have written equal values under a name, or both have written none."""
    if name not in one or name not in other:
        return name not in one and name not in other
    return are_close(one[name].value, other[name].value)


def _cut_of(
    plan: Plan, whole: Sequence[float], ran: Sequence[Ran], parts: Sequence[Any]
) -> list[Cut]:
    """Return a cut for each term, from parts with items; skip terms whose losses are not finite."""
    found: list[Cut] = []
    weights = weigh(plan.weight_fn, parts)
    shifted = _shifted(plan, parts) or weights
    pairs = [each for each in zip(weights, shifted, strict=True) if each[0] or len(parts) == 1]
    for place, term in enumerate(plan.terms or ("",)):
        rows = [
            (each.losses[place], of_term(weight, place), of_term(other, place))
            for each, (weight, other) in zip(ran, pairs, strict=True)
        ]
        columns = list(zip(*[row for row in rows if row[1]], strict=True))
        if columns and all(map(isfinite, columns[0])):
            others = columns[2] if shifted is not weights else None
            found.append(Cut(term, whole[place], columns[0], columns[1], others))
    return found


def of_term(weight: Weight, place: int) -> float:
    return weight[place] if weight else 0.0


def ones_of(plan: Plan) -> Weight:
    """Return a weight of one item for each term of the loss."""
    return (1.0,) * (len(plan.terms) or 1)


def _shifted(plan: Plan, parts: Sequence[Any]) -> Sequence[Weight] | None:
    """Return the weights that the parts would have with the opposite `shift` of `labels_at`.

    Return None if `weight_fn` is not `labels_at`, or if `shift` does not apply.
    """
    weight_fn = plan.weight_fn
    if not isinstance(weight_fn, partial) or weight_fn.func is not labels_at:
        return None
    other = 0 if weight_fn.keywords.get("shift") else 1
    try:
        return weigh(partial(labels_at, **{**weight_fn.keywords, "shift": other}), parts)
    except BatchError:
        # There is one label per sample, so shift does not apply.
        return None


def metrics_of(
    whole: Ran, ran: Sequence[Ran], weights: Sequence[Weight]
) -> dict[str, tuple[float, float]]:
    """Return metrics of the batch, and of its parts together, by name, if known and finite."""
    found = {}
    for name, value in whole.metrics.items():
        of_parts = [each.metrics.get(name, ()) for each in ran]
        if not value or any(len(each) != len(value) for each in of_parts):
            continue
        if len(value) == 2:
            sums = [sum(each) for each in zip(*of_parts, strict=True)]
            pair = _divided(*value), _divided(*sums)
        else:
            # The weight has one number here: a metric that is a mean is refused where there are
            # several terms.
            total = sum(weight for (weight,) in weights)
            parts = zip(of_parts, weights, strict=True)
            pair = value[0], sum(each * weight for (each,), (weight,) in parts) / total
        if all(map(isfinite, pair)):
            found[name] = pair
    return found


def _divided(total: float, count: float) -> float:
    return total / count if count else float("nan")


def times(share: Weight, factor: float) -> Weight:
    return tuple([each * factor for each in share])
