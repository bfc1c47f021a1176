"""The mean over the global batch, from sums of weights, losses and metrics over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from accel_fn.core import primitives
from accel_fn.core.differentiable import TRAINING
from accel_fn.core.given_batches import Place, check_same_place, number_of
from accel_fn.core.loss import COUNTED, Metrics, by_count, counted_in, divided
from accel_fn.core.plan import Plan
from accel_fn.core.report import Report
from accel_fn.core.state import DistState, LossScale, data_places, over, step_name
from accel_fn.core.weights import Weight, shares, total_weight
from accel_fn.errors import BatchError, LossError

_REPAIR = "return all metrics for every batch"


class Layout:
    """Layout of the losses and metrics of a step, equal in every step and on every rank.

    The metrics are those of the first batch that has items.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        sizes: Mapping[str, int] | None = None,
        *,
        is_sum: bool = False,
        terms: Sequence[str] = (),
    ) -> None:
        self.dtype = dtype
        self.is_sum = is_sum
        """Whether a loss is a sum over its items. The step then adds up losses as they are, without
        weights."""
        self.terms = terms
        """The names of the loss's terms, whose means are one tensor, [terms]. Empty if the loss
        is one mean, []."""
        self.sizes = sizes
        """How many numbers each metric has: 1 for a mean, 2 for (sum, count). None until a batch
        has had items."""
        self.counts: tuple[str, ...] | None = None
        """The names of the `(sum, count)` terms; () for a loss of means. None if this is not
        known yet."""
        self.finish: Mapping[str, Callable[[Mapping[str, Tensor]], Any]] = {}
        """Functions of the means of a step, by name. Their values are metrics too."""
        self.predicts = True
        """Whether backwards may use a predicted weight of the batch, which the end of the step
        corrects."""
        self.last_total: Weight = ()
        """The weight of the last global batch that a step has trained on. `PredictedMean`
        predicts the same weight for the next batch."""
        self.pending_error: LossError | None = None
        """An error that all ranks raise in the next step."""

    def without_metrics(self) -> Layout:
        """Return the layout of a forward, whose only metrics are the loss's own sums and counts."""
        sizes = None if self.counts is None else {COUNTED + name: 2 for name in self.counts}
        return Layout(self.dtype, sizes=sizes, is_sum=self.is_sum, terms=self.terms)

    def zero(self, state: DistState) -> Tensor:
        """Return zeros in the shape of the mean loss, or of the means of its terms."""
        shape = (len(self.terms),) if self.terms else ()
        return torch.zeros(shape, dtype=self.dtype, device=state.device)

    def report(
        self, mean: Tensor, total: Weight, metrics: Mapping[str, Tensor], **others: Any
    ) -> Report:
        """Return a report of the mean loss, or of the means of its terms."""
        # Most steps take this faster path.
        if not (metrics or self.terms or self.finish):
            return Report(loss=mean, weight=total[0] if total else 0, metrics=metrics, **others)
        report = self._report(mean, total, metrics, **others)
        return finished("step", self.finish, report) if self.finish else report

    def _report(
        self, mean: Tensor, total: Weight, metrics: Mapping[str, Tensor], **others: Any
    ) -> Report:
        others["metrics"] = metrics
        weights = total or (0,) * (len(self.terms) or 1)
        pairs = counted_in(metrics)
        if pairs:
            others["metrics"] = {n: each for n, each in metrics.items() if n not in pairs}
            every = {name.removeprefix(COUNTED): pair for name, pair in pairs.items()}
            means = {name: divided(pair) for name, pair in every.items()}
            loss = torch.stack([*means.values()]).sum()
            counts = {name: pair[1] for name, pair in every.items()}
            terms = means if len(means) > 1 else {}
            return Report(loss=loss, weight=weights[0], counts=counts, terms=terms, **others)
        if not self.terms:
            return Report(loss=mean, weight=weights[0], **others)
        weight = dict(zip(self.terms, weights, strict=True))
        terms = dict(zip(self.terms, mean.unbind(), strict=True))
        return Report(loss=mean.sum(), weight=weight, terms=terms, **others)

    def settle(self, state: DistState, sums: Sequence[MetricSums]) -> LossError | None:
        """Fix the metric names in the first batch with items; return an error if metrics differ.

        With one rank, raise the error instead. In the first batch with items, raise it on all
        ranks.
        """
        wrong = next((each.wrong for each in sums if each.wrong), "")
        found = [each.sizes for each in sums if each.sizes is not None]
        if self.sizes is None:
            self.sizes = self._agree(state, found, wrong)
        differing = (_differing(self.sizes or {}, each) for each in found if each != self.sizes)
        wrong = wrong or next((f"{text}; {_REPAIR}" for text in differing), "")
        if wrong and state.world_size == 1:
            raise LossError(wrong)
        return LossError(wrong) if wrong else None

    def _agree(
        self, state: DistState, found: Sequence[Mapping[str, int]], wrong: str
    ) -> Mapping[str, int] | None:
        """Exchange the metric names that ranks have found; raise on every rank if they differ."""
        # Ranks without items do not know the metrics, but the ranks can only sum vectors of one
        # length.
        expected = None
        for rank, (of_rank, failure) in enumerate(
            primitives.exchange((found, wrong), state, "step")
        ):
            if failure:
                raise LossError(failure)
            for each in of_rank:
                expected = each if expected is None else expected
                if each != expected:
                    raise LossError(f"{_differing(expected, each)} on rank {rank}; {_REPAIR}")
        return expected

    def means(self, values: Mapping[str, Tensor], total: Weight, like: Tensor) -> dict[str, Tensor]:
        """Compute the metrics' means from the sums over all ranks; nan if nothing was counted.

        The result also has the sums and counts of the loss, if it returns them.
        """
        nothing = like.new_full((), torch.nan)
        means = {
            name: _mean(values[name]) if total and name in values else nothing
            for name, _ in self._sorted()
            if not name.startswith(COUNTED)
        }
        return {**self.pairs(values, like), **means}

    def pairs(self, values: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
        """Return the sums and counts of the loss over all ranks, [2] each."""
        names = [name for name, _ in self._sorted() if name.startswith(COUNTED)]
        return {name: values[name] if name in values else like.new_zeros(2) for name in names}

    def vector(self, values: Mapping[str, Tensor], like: Tensor, *, is_wrong: bool) -> list[Tensor]:
        """List this rank's sums in the order of names: 0 if a sum is missing, nan if its metrics differ."""
        missing = torch.nan if is_wrong else 0.0
        held: Mapping[str, Tensor] = {} if is_wrong else values
        return [
            held[name] if name in held else like.new_full((size,), missing)
            for name, size in self._sorted()
        ]

    def unpacked(self, vector: Tensor) -> dict[str, Tensor]:
        """Split the vector into sums by name."""
        names, sizes = [name for name, _ in self._sorted()], [size for _, size in self._sorted()]
        return dict(zip(names, torch.split(vector, sizes), strict=True))

    def _sorted(self) -> list[tuple[str, int]]:
        return sorted((self.sizes or {}).items())


def finished(
    function: str, finish: Mapping[str, Callable[[Mapping[str, Tensor]], Any]], report: Report
) -> Report:
    """Add the values of the `finish` functions to the metrics of a report."""
    means = {"loss": report.loss, **report.terms, **report.metrics}
    found = finish_means(function, finish, means, report.loss)
    return replace(report, metrics={**report.metrics, **found})


def finish_means(
    function: str,
    finish: Mapping[str, Callable[[Mapping[str, Tensor]], Any]],
    means: Mapping[str, Tensor],
    like: Tensor,
) -> dict[str, Tensor]:
    """Compute the `finish` functions of the means; return their values by name, each []."""
    found = {}
    for name, fn in finish.items():
        if name in means:
            raise LossError(
                f"{function}: finish must name new metrics, got {name!r}, which the loss has"
            )
        value = fn(means)
        is_number = isinstance(value, int | float) or (
            isinstance(value, Tensor) and not value.ndim and not value.is_complex()
        )
        if not is_number:
            got = f"{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise LossError(
                f"{function}: finish must return a real number or 0-dim tensor for {name!r}, got {got}"
            )
        found[name] = torch.as_tensor(value).detach().to(like)
    return found


def _mean(value: Tensor) -> Tensor:
    """Return a metric's mean, []: the entry of a [1] tensor, or sum / count of a [2] tensor."""
    return value[0] if len(value) == 1 else value[0] / value[1]


class MetricSums:
    """Adds up the metrics of micro-batches; a mean is first multiplied by its micro-batch's factor."""

    wrong: str = ""
    """The reason why these metrics cannot be added up; empty if they can."""

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self.sizes = sizes
        """How many numbers each metric has, 1 or 2; None before the first micro-batch with items."""
        self._means: Tensor | None = None
        """The sums of metrics that are means, [means], in the order of their names."""
        self._pairs: Tensor | None = None
        """The sums of metrics that are pairs, [pairs, 2], in the order of their names."""

    @property
    def found(self) -> dict[str, Tensor] | None:
        """Return the sums by name, [1] or [2]; None before the first micro-batch with items."""
        if self.sizes is None:
            return None
        means = iter(() if self._means is None else torch.split(self._means, 1))
        pairs = iter(() if self._pairs is None else self._pairs.unbind())
        return {name: next(means if size == 1 else pairs) for name, size in self.sizes.items()}

    def add(self, metrics: Metrics, factor: float | Tensor, like: Tensor) -> None:
        """Add the metrics of a micro-batch, in the dtype and on the device of `like`.

        Means are multiplied by the factor. A loss with several terms may have no metrics that are
        means: `LossModule` replaces them by the rule that they break.

        Cost: a few operations, for any number of metrics.
        """
        sizes: dict[str, int] = {}
        means: list[Tensor] = []
        pairs: list[Tensor] = []
        for name in sorted(metrics):
            value = metrics[name]
            if isinstance(value, str):
                self.wrong = self.wrong or f"step: loss_fn must {value}"
            elif isinstance(value, tuple):
                sizes[name] = 2
                pairs += value
            else:
                sizes[name] = 1
                means.append(value)
        if self.sizes is None:
            self.sizes = sizes
        elif sizes != self.sizes:
            self.wrong = self.wrong or f"{_differing(self.sizes, sizes)}; {_REPAIR}"
            return
        if means:
            new = torch.stack([each.to(like) for each in means]) * factor
            self._means = new if self._means is None else self._means + new
        if pairs:
            new = torch.stack([each.to(like) for each in pairs]).view(-1, 2)
            self._pairs = new if self._pairs is None else self._pairs + new

    def differ_from(self, layout: Layout) -> bool:
        """Return whether these metrics differ from those of the first batch."""
        known = self.sizes is not None and layout.sizes is not None
        return known and self.sizes != layout.sizes


def sizes_of(values: Mapping[str, Tensor]) -> dict[str, int]:
    """Return, for each metric, how many numbers its sum has."""
    return {name: len(value) for name, value in values.items()}


def _differing(expected: Mapping[str, int], found: Mapping[str, int]) -> str:
    names = [
        [name if size == 1 else f"{name} (a pair)" for name, size in sorted(each.items())]
        for each in (expected, found)
    ]
    return (
        "step: loss_fn must return the same metrics in every step and on every rank, "
        f"{names[0]} at first, got {names[1]}"
    )


def differing_elsewhere(layout: Layout) -> LossError:
    """Return the error that a rank with valid metrics raises if another rank has different ones."""
    kinds, every = ("terms and metrics", "all") if layout.terms else ("metrics", "all metrics")
    return LossError(
        f"step: loss_fn must return the same {kinds} in every step and on every rank, got others on "
        f"another rank; return {every} for every batch"
    )


NUM_FACTS = 4
"""The number of entries between the terms and the metrics in a message of a step to other ranks."""
_PACK = 1 << 21
"""A number that is more than twice the number of micro-batches of a rank."""


def packed(place: int, num_microbatches: int, *, stop: bool) -> float:
    """Pack three facts about a rank's batch into one number, since a message may hold only five numbers."""
    return float(_PACK * place + 2 * num_microbatches + stop)


def unpacked(counts: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    """Split packed integers into places, numbers of micro-batches and `stop`, [ranks] each."""
    places, rest = np.divmod(counts, _PACK)
    return places, rest // 2, rest % 2


class GlobalMean:
    """The mean over the items of one global batch, which every rank adds up over its micro-batches.

    The ranks that share the batch compute two small sums. The sum of the weights starts before the
    first forward, and the ranks wait for it before the first backward. The sum of losses and
    metrics starts before the last backward. A share is w * num_ranks / w_total, so that an average
    over the ranks is the mean over the global batch. If the loss has several terms, each term has a
    weight and a share. Weights go to all ranks of the world, since failures and requests to stop
    concern all: if a rank cannot count its batch, it sends NaN as its weight, and all ranks raise.
    """

    # `differentiable.Running` declares these three attributes; collectives in the loss read them.
    is_exact_over_ranks = True
    """Whether gradients are averaged over all ranks, so that they may flow through a collective
    in the loss."""
    is_evenly_split = False
    calls_collectives = False
    correction = 1.0
    """The factor that corrects gradients which were computed with a predicted total weight. It is 1
    until the total is known, and if the prediction was right."""

    def __init__(
        self,
        state: DistState,
        weights: Sequence[Weight],
        failure: Exception | None = None,
        *,
        stop: bool = False,
        place: Place | None = None,
        rows: int = 0,
        layout: Layout,
        is_forward: bool = False,
    ) -> None:
        # The suffix is in the names of collectives: if one rank trains while another rank
        # evaluates, their names differ, and both raise.
        self._suffix = " forward" if is_forward else ""
        failure = failure or layout.pending_error
        self.own_weight = total_weight(weights)
        """The weight of this rank's batch."""
        self._num_terms = len(layout.terms) or 1
        nothing = math.nan if failure else 0
        numbers = () if failure else self.own_weight
        numbers = numbers or (nothing,) * self._num_terms
        self._state = state
        self.layout = layout
        self._num_ranks = 1
        self._factor: tuple[Weight | None, Weight] = (None, ())
        """With one rank: the weight of the newest micro-batch, and its share, by which the loss of
        the micro-batch is multiplied too."""
        self._failure = failure
        self._metrics = MetricSums()
        self._pending: list[primitives.Pending | primitives.PendingTotal] = []
        self._total: Weight | None = None
        self._divisor: Weight | None = None
        """The total by which weights are divided. None until it has arrived, unless it is predicted."""
        self.num_microbatches = len(weights)
        self.is_open = False
        """With a `(sum, count)` loss: whether backwards compute gradients of the sum, which are
        divided by the count at the end of the step."""
        self.of_ranks: list[tuple[bool, int]] = []
        """With several ranks, once the total is known: for each rank, whether its batch has a
        weight > 0, and its number of micro-batches."""
        TRAINING.batch = ref(self)
        self.stop = stop
        """Once the total is known: whether a `should_stop` function of any rank has returned
        True."""
        self.samples = rows
        """Once the total is known: the number of rows of the global batch."""
        if state.world_size == 1:
            self._mean = layout.zero(state)
            self._total = self._divisor = checked_total(numbers, failure)
        else:
            self._sums = torch.zeros(
                len(numbers) + NUM_FACTS, dtype=layout.dtype, device=state.device
            )
            """The sum of the loss (or of each term), the number of ranks whose metrics differ,
            zeros in the places where other messages have facts, and the sums of metrics."""
            self._mean = self._losses()
            # Sum the weights on the host in float64, which is exact for integers up to 2**53. So no
            # rank waits for its accelerator, the accelerator need not support float64, and an error
            # on one rank reaches all ranks without the accelerator. The message is as long as the
            # message of losses and metrics: if one rank is a step ahead, the two messages meet in
            # one collective, and `start_total` can compare their names.
            more = [0.0] * (NUM_FACTS - 2 + sum((layout.sizes or {}).values()))
            self._num_ranks = state.data.world_size
            self._data = over(state)
            """The ranks that share the batch."""
            count = packed(number_of(place), len(weights), stop=stop)
            self._facts = (*numbers, count, float(rows))
            """Weights, packed facts and rows of this rank's batch, which go to all ranks."""
            self._begin([*self._facts, *more])
            if self._num_ranks < state.world_size:
                # Wait here. A rank that failed never reaches a collective of the forward, in which
                # ranks along other axes would wait for it.
                self.total()

    def _begin(self, message: Sequence[float]) -> None:
        """Start the sum of the weights."""
        self._totals = torch.tensor(message, dtype=torch.float64)
        self._weights = self._sum(self._totals, self._state, "weights")
        self._pending.append(self._weights)

    def _sum(
        self, tensor: Tensor, state: DistState, what: str
    ) -> primitives.Pending | primitives.PendingTotal:
        # A rank may catch the error of its loss and continue with another step. The name of the
        # step is in the collective's name, so all ranks then raise.
        name = step_name(self._state.step + 1, self._state.call)
        return primitives.start_total(tensor, state, "step", what=f"{what}{self._suffix} {name}")

    def _losses(self) -> Tensor:
        """Return the sum of the loss, or of its terms, as a view of `_sums`."""
        return self._sums[: self._num_terms] if self.layout.terms else self._sums[0]

    def total(self) -> Weight:
        """Wait for the weight of the global batch, and return it."""
        if self._total is None:
            self._wait()
            num = self._num_terms
            every = self._facts_of_ranks()
            own = every[data_places(self._state)]
            weights, counts = every[:, :num], every[:, num].astype(np.int64)
            # If a rank cannot count its batch, its weights are NaN. Then add up the weights of all
            # ranks, not only of those along `dp`, so that ranks along other axes raise too.
            counted = every if np.isnan(weights).any() else own
            numbers = tuple(counted[:, :num].sum(0).tolist())
            self._total = checked_total(numbers, self._failure)
            self._divisor = self._divisor or self._total
            self.samples = int(own[:, num + 1].sum())
            places, nums, stops = unpacked(counts)
            check_same_place(places.tolist())
            weigh: list[bool] = (weights != 0).max(1).tolist()
            self.of_ranks = [*zip(weigh, nums.tolist(), strict=True)]
            self.stop = bool(stops.any())
        return self._total

    def _facts_of_ranks(self) -> np.ndarray[Any, Any]:
        """Return the numbers that all ranks have sent, [ranks, numbers]; each row begins with `_facts`."""
        assert isinstance(self._weights, primitives.PendingTotal)
        return self._weights.ranks

    def _wait(self) -> None:
        for each in self._pending:
            each.wait()
        self._pending.clear()

    def share(self, weight: Weight) -> Weight:
        """Return the factor for the backward of a micro-batch of this weight."""
        total = self.total() if self._divisor is None else self._divisor
        if self.layout.is_sum:
            return (float(self._num_ranks),) if weight else ()
        share = shares(weight, total, self._num_ranks)
        if self._num_ranks == 1:
            self._factor = weight, share
        return share

    def add(self, loss: Tensor, metrics: Metrics, weight: Weight) -> None:
        """Add the mean loss and the metrics of a micro-batch to the sums."""
        total = self.total() if self._divisor is None else self._divisor
        known, factor = self._factor
        self.add_scaled(loss, metrics, factor if known is weight else shares(weight, total))

    def add_scaled(self, loss: Tensor, metrics: Metrics, factor: Weight) -> None:
        """Add a loss and metrics times a factor; skip those of weight 0, which may be nan."""
        if not factor:
            return
        if metrics and counted_in(metrics):
            # Add nothing to the mean here: the loss is a sum, and `metrics` holds this sum with its
            # count.
            pass
        elif self.layout.terms:
            self._mean.add_(weighed(loss.to(self._mean.dtype), factor))
        else:
            # Most losses take this faster path.
            self._mean.add_(loss, alpha=1.0 if self.layout.is_sum else factor[0])
        if metrics or self._metrics.sizes:
            self._metrics.add(metrics, factor[0], self._mean)
        elif self._metrics.sizes is None:
            self._metrics.sizes = {}

    def send(self) -> None:
        """Start to sum losses and metrics over the ranks. Call this after the last `add`."""
        if self._metrics.sizes or self._metrics.wrong or self.layout.sizes != {}:
            self._settle_metrics()
        if self._num_ranks > 1:
            self._pending.append(self._sum(self._sums, self._data, "losses"))

    def _settle_metrics(self) -> None:
        """Compare this rank's metrics with the first batch's; append their sums to the losses."""
        layout, several = self.layout, self._state.world_size > 1
        error = layout.settle(self._state, [self._metrics])
        if not several:
            return
        if error:
            # Mark the error in the sum, so that the other ranks notice it. On an accelerator, the
            # host would have to wait to read the mark, so all ranks raise in the next step instead.
            self._failure, self._sums[self._num_terms] = error, 1
            layout.pending_error = None if self._sums.is_cpu else error
        sums = layout.vector(self._metrics.found or {}, self._sums, is_wrong=error is not None)
        if sums:
            self._sums = torch.cat([self._sums, *sums])
            self._mean = self._losses()

    def close(self) -> tuple[Tensor, dict[str, Tensor], Weight]:
        """Wait for the sums; return mean loss (or means of terms), metrics and weight."""
        total = self.total() if self._total is None else self._total
        if self._state.world_size > 1:
            self._wait()
            if self._sums.is_cpu and self._sums[self._num_terms]:
                raise self._failure or differing_elsewhere(self.layout)
        return self._mean, self._means(total) if self.layout.sizes else {}, total

    def _means(self, total: Weight) -> dict[str, Tensor]:
        several = self._state.world_size > 1
        sums = (
            self.layout.unpacked(self._sums[self._num_terms + NUM_FACTS :])
            if several
            else self._metrics.found or {}
        )
        return self.layout.means(sums, total, self._mean)

    def loss(self) -> Tensor:
        """Return the mean loss over the global batch, [], after a forward without gradients."""
        mean, metrics, total = self.close()
        return self.layout.report(mean, total, metrics=metrics).loss

    def agree_on_counts(self, found: tuple[str, ...] | None) -> None:
        """Exchange, in the first batch, whether the loss is `(sum, count)`.

        A rank without items cannot find this out by itself.
        """
        weighing = [weighs for weighs, _ in self.of_ranks[data_places(self._state)]]
        if all(weighing) or not any(weighing):
            self.layout.counts = found
            return
        every = primitives.exchange(found, self._data, "step")
        self.layout.counts = next((each for each in every if each is not None), None)

    def seed_by_counts(self, every: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return each sum's factor, [terms]: number of ranks / total count; 0 for a count of 0.

        `every` holds the sums and counts of each micro-batch of this rank.
        """
        names = [COUNTED + name for name in self.layout.counts or ()]
        counts = torch.zeros(len(names), dtype=self._mean.dtype, device=self._mean.device)
        for pairs in every:
            if all(name in pairs for name in names):
                counts = counts + torch.stack([pairs[name][1].to(counts) for name in names])
        if self._num_ranks > 1:
            self._sum(counts, self._data, "counts").wait()
        return by_count(counts, self._num_ranks)

    def open_factor(self, metrics: Mapping[str, Tensor]) -> Tensor:
        """Return the factor that turns averaged gradients of a sum into gradients of the mean."""
        (pair,) = counted_in(metrics).values()
        return by_count(pair[1], self._num_ranks)

    def extras(self, plan: Plan) -> dict[str, Any]:
        """Return the entries that this batch adds to `Report.extras`."""
        return {"stop": self.stop} if plan.should_stop else {}


def checked_total(total: Weight, failure: Exception | None) -> Weight:
    """Return the total as exact ints where possible; raise if a rank could not count its batch."""
    if failure is not None:
        raise failure
    counts = tuple(map(_checked, total))
    return counts if any(counts) else ()


def _checked(total: float) -> float:
    if total != total:
        raise BatchError(
            "step: every rank must be able to count its batch; another rank could not, see the error "
            "that it raised"
        )
    # Keep a larger total as a float, since torch does not accept an int of more than 64 bits.
    is_count = float(total).is_integer() and total <= 2**53
    return int(total) if is_count else total


def weighed(loss: Tensor, factor: Weight) -> Tensor:
    """Multiply the loss, or each term, by its factor; a factor of 0 gives 0, even for nan."""
    if not loss.ndim:
        return loss * factor[0]
    pairs = zip(loss.unbind(), factor, strict=True)
    return torch.stack([each * part if part else loss.new_zeros(()) for each, part in pairs])


def seed_of(loss: Tensor, share: Weight, scaler: LossScale | None) -> Tensor | None:
    """Return the seed of a backward: the share times the loss scale. None means 1."""
    if scaler is None and share == (1.0,):
        return None
    if scaler is None and not loss.ndim:
        return loss.new_full((), share[0] if share else 0.0)
    numbers = share or (0.0,) * (len(loss) if loss.ndim else 1)
    if scaler is None:
        seeds = [loss.new_full((), each) for each in numbers]
    else:
        scale = scaler.scale.double() if loss.dtype == torch.float64 else scaler.scale
        seeds = [(scale * each).to(loss.dtype) for each in numbers]
    return torch.stack(seeds) if loss.ndim else seeds[0]
