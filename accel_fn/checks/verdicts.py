"""Judge the comparison of a batch with its parts: errors, warnings and `explain` text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from accel_fn.checks.findings import Cut, Found, Gradients, Reads, Write, wrong_gradient
from accel_fn.core.loss import COUNTED
from accel_fn.core.microbatches import in_microbatches
from accel_fn.core.plan import Plan
from accel_fn.core.state import DistState
from accel_fn.core.warn import warn_user
from accel_fn.errors import BatchError, LossError, PlanError

_SHOWN = 3


class Verdicts:
    """Judges the findings of the ranks, with the same result on all ranks."""

    def __init__(self, state: DistState, plan: Plan, *, is_on: bool, is_cut: bool) -> None:
        self._plan = plan
        self._is_main = state.is_main
        self._is_over_ranks = state.data.world_size > 1
        self._is_in_microbatches = in_microbatches(plan)
        self._cuts_rows = all(map(_cuts_rows, plan.split))
        """Whether batches are cut along rows. A user's function may cut so that its own parts
        agree."""
        self.has_rows = True
        """Whether the batch has rows. If a micro-batch is a list, it may hold graphs, with one
        tensor each."""
        names = {id(each): name for name, each in plan.model.named_parameters()}
        self._names = [names[id(each)] for each in plan.trained()]
        self._batches: list[int] = []
        """The numbers of the batches whose parts agreed."""
        self._fitting = {"mean", "sum", "shift"}
        """The reductions that have fitted all batches so far."""
        self._warned: set[str] = set()
        self.sums: list[str] = []
        """Buffers to which each rank adds values of its own rows. The next comparison checks that
        the loop has added them up over the ranks."""
        self._is_counted = False
        """Whether the loss is `(sum, count)`."""
        self.is_open = True
        """Whether to judge further batches, because no fault has been found yet."""
        self.text = "is not compared with those of its parts"
        """The result of the comparison, for `explain`."""
        if is_on:
            self.text = (
                "is compared with those of its parts in the first step"
                if is_cut
                else "is of whole batches alone, so it may be a mean or a sum"
            )

    def not_compared(self, reason: str) -> None:
        """Record why a batch was not compared, unless an earlier batch was."""
        if not self._batches:
            self.text = f"could not be compared with those of its parts: {reason}"

    def judge(
        self, every: Sequence[Found] | str, of_samples: Sequence[Found] | str, number: int
    ) -> None:
        """Judge a batch that was cut along its rows and, if they are known, along its samples."""
        found = [each for some in (every, of_samples) if not isinstance(some, str) for each in some]
        self._is_counted |= any(each.is_counted for each in found)
        if isinstance(of_samples, str):
            assert not isinstance(every, str)
            self._judge_cut(every, number)
        elif isinstance(every, str):
            self._judge_cut(of_samples, number)
        else:
            self._judge_both(every, of_samples, number)

    def _judge_both(self, every: Sequence[Found], of_samples: Sequence[Found], number: int) -> None:
        by_rows, by_samples = self._agrees(every), self._agrees(of_samples)
        # Parts that are cut from collated rows still hold numbers that collate_fn computed over all
        # samples. If the loss divides by one of these numbers, the losses of the parts add up to
        # that of the batch.
        numbers = [*dict.fromkeys(name for each in of_samples for name in each.denominators)]
        adds_up = not by_rows and all("sum" in each.fitting(each.cuts) for each in every)
        if numbers and adds_up and (not by_samples or self._is_in_microbatches):
            self._refuse_numbers(numbers, of_samples, every)
        if by_samples and not by_rows:
            # Rows may have roles by their place, such as chosen rows before rejected ones. Then
            # training on several ranks is right, since each rank collates its samples.
            # Micro-batches are wrong, since they cut the collated rows.
            if self._is_in_microbatches and self._cuts_rows:
                raise BatchError(
                    "step: batch must have one row a sample where accumulate cuts it, got one whose rows "
                    f"have roles by their place: in batch {number} parts of its rows give another loss, "
                    "parts of its samples do not; return a dict or tuple of tensors with one row a sample "
                    "from collate_fn, or give accumulate a split"
                )
            self._judge_cut(of_samples, number)
            return
        if by_samples or (not by_rows and not numbers) or not self._is_over_ranks:
            self._judge_cut(every, number)
            return
        cut = next((cut for each in of_samples for cut in each.cuts), None)
        got = (
            ""
            if cut is None
            else f": parts give {_numbers(cut.losses)}, all samples {cut.whole:.6g}"
        )
        what = f"{_some(numbers)}, by which" if numbers else "padding or a mixture, by which"
        self.is_open = False
        self.text = f"depends on the samples that collate_fn sees{got}"
        self._warn(
            "step: collate_fn should make rows that do not depend on the other samples of a batch, of which "
            f"each rank collates its own part, got one that computes over them ({what} the loss differs) in "
            f"batch {number}{got}; so the result depends on the number of ranks. Use "
            'shard_loader(..., collate="global"), compute it in loss_fn, or build(..., check_loss=False)'
        )

    def _refuse_numbers(
        self, numbers: Sequence[str], of_samples: Sequence[Found], every: Sequence[Found]
    ) -> NoReturn:
        """Refuse a loss that divides by a number which collate_fn computes over all samples."""
        cut = next(cut for found in (*of_samples, *every) for cut in found.cuts)
        raise LossError(
            "step: loss_fn must return the mean over the items that weight_fn counts, got one by "
            f"{_some(numbers)}, which collate_fn computes over all samples that it sees: "
            f"{cut.whole:.6g} for a batch, {_numbers(cut.losses)} for parts; let weight_fn count the "
            'part\'s own number and loss_fn divide by it, use shard_loader(..., collate="global") beside '
            'Plan(..., reduction="sum"), or build(..., check_loss=False)'
        )

    def _agrees(self, every: Sequence[Found]) -> bool:
        """Return whether losses and gradients of the parts add up to those of the batch."""
        if any(each.calls_collectives for each in every):
            return True
        fits = all(self._declared in each.fitting(each.cuts) for each in every)
        gradients = [each.gradients for each in every]
        return fits and self._wrong(gradients, every[0].precisions) is None

    def _judge_cut(self, every: Sequence[Found], number: int) -> None:
        """Refuse a loss that fits another reduction than the plan's; warn once if results depend on cuts."""
        declared, precisions = self._declared, every[0].precisions
        # If the loss differs from run to run, the loss keeps state that could not be restored, and
        # cuts cannot be compared.
        differing = next(filter(None, [each.differing() for each in every]), None)
        if differing is not None:
            self._warn_of_state(differing)
            return
        if any(each.calls_collectives for each in every):
            self._judge_collectives(every, number, precisions)
            self._judge_writes(every)
            return
        here = set.intersection(*(each.fitting(each.cuts) for each in every))
        self._fitting &= here
        if declared not in here:
            self._refuse_reduction(every)
            # If a forward reads values that it has just written from its rows, report this write:
            # it is the cause.
            if not self._judge_writes(every):
                self._warn_of_neither(every, number, [each.cuts for each in every])
            return
        self._agreed(number, every, precisions)
        # If the gradient differs because of a write, report this write: it is the cause.
        if self._judge_writes(every):
            return
        by_row = [each.by_row for each in every if each.by_row is not None]
        if any(declared not in each.fitting(each.by_row[0]) for each in every if each.by_row):
            self._warn_of_neither(every, number, [cuts for cuts, _ in by_row])
            return
        for gradients in (
            [each.gradients for each in every],
            [gradients for _, gradients in by_row],
        ):
            if self._is_wrong(gradients, number, precisions):
                return
        self._judge_metrics(every)

    def _agreed(
        self, number: int, every: Sequence[Found], precisions: Sequence[torch.dtype]
    ) -> None:
        self._batches.append(number)
        self.text = (
            f"is a {self._declared} over the items of {_listed(self._batches)}: those of its parts "
            "agree, and their gradients"
        )
        if all(each.gradients is None for each in every):
            self.text = self.text.removesuffix(", and their gradients")
        unseen = next((each.unseen for each in every if each.unseen), "")
        halves = {torch.float16, torch.bfloat16}.intersection(precisions)
        if halves:
            unseen += (" and " if unseen else "") + "differences of 2% or less, in half precision"
        if unseen:
            self.text += f"; not seen are {unseen}"

    @property
    def _declared(self) -> str:
        """Return the reduction that the loss should have: "sum" for a `(sum, count)` loss."""
        return "sum" if self._is_counted else self._plan.reduction

    def _refuse_reduction(self, every: Sequence[Found]) -> None:
        declared, cut = self._declared, every[0].cuts[0]
        if self._is_counted and "mean" in self._fitting:
            raise LossError(
                "step: loss_fn must return the sum over its items beside a count, got a mean: "
                f"{cut.whole:.6g} for a batch, {_numbers(cut.losses)} for parts; return (mean * count, "
                "count), or the mean alone, with a weight_fn, or build(..., check_loss=False)"
            )
        if self._is_counted:
            return
        if declared == "mean" and "shift" in self._fitting:
            fitting = 0 if getattr(self._plan.weight_fn, "keywords", {}).get("shift") else 1
            raise LossError(
                "step: weight_fn must count the labels that the loss is a mean over, got count_labels(shift="
                f"{1 - fitting}) where shift={fitting} fits; use count_labels(..., shift={fitting}), or "
                "build(..., check_loss=False)"
            )
        if other := [name for name in ("mean", "sum") if name in self._fitting]:
            raise LossError(
                f"step: loss_fn must return the {declared} over the batch's items, got a {other[0]}: "
                f"{cut.whole:.6g} for a batch, {_numbers(cut.losses)} for parts of {_numbers(cut.weights)} "
                f"items; use Plan(..., reduction={other[0]!r}), return the {declared}, or "
                "build(..., check_loss=False)"
            )

    def _warn_of_neither(
        self, every: Sequence[Found], number: int, of_ranks: Sequence[Sequence[Cut]]
    ) -> None:
        declared = self._declared
        cut = next(
            cut
            for found, cuts in zip(every, of_ranks, strict=False)
            for cut in cuts
            if declared not in found.fitting([cut])
        )
        of_term = f"of the term {cut.term!r} " if cut.term else ""
        got = f"{of_term}parts give {_numbers(cut.losses)}, the batch {cut.whole:.6g}"
        self.is_open = False
        self.text = f"is neither a mean nor a sum over the items of {_listed([number])}: {got}"
        if self._is_counted:
            self._warn(
                "step: loss_fn should return a sum over items beside its count, of which ranks and "
                f"micro-batches add up their own, got one in batch {number} whose parts do not add up: "
                f"{got}; so the result depends on their number. Return the sum of what each item gives, use "
                "batch_mean for statistics of the batch, or build(..., check_loss=False)"
            )
            return
        self._warn(
            "step: loss_fn should return the mean over the items that weight_fn counts, of which ranks "
            f"and micro-batches compute their share, got one in batch {number} that is neither a mean "
            f"nor a sum: {got}; so the result depends on their number. Let weight_fn count what the "
            "loss divides by (count_labels(class_weight=) for class weights, a mapping for several "
            "terms), gather the rows of a loss over pairs, or build(..., check_loss=False)"
        )

    def _is_wrong(
        self,
        gradients: Sequence[Gradients | None],
        number: int,
        precisions: Sequence[torch.dtype],
    ) -> bool:
        """Warn if the gradients of the parts differ from those of the batch, although the losses agree."""
        found = self._wrong(gradients, precisions)
        if found is None:
            return False
        name, off = found
        self.is_open = False
        got = f"the gradient of {name} differs by {off:.2g} of its norm"
        self.text = (
            f"is a {self._declared} over its items, its gradient is not: in "
            f"{_listed([number])} {got}"
        )
        self._warn(
            "step: loss_fn should have a gradient that is the mean of those of its parts, of which ranks "
            f"and micro-batches compute their share, got one in batch {number} of which {got} between "
            "a batch and its parts, though their losses agree; so the result depends on their number. What "
            "the loss computes over the whole batch (a value that it is divided by, a detached mean, its "
            "own autograd.grad) must be over the rows of all ranks: gather the rows, or reduce_mean, without "
            "accumulate. Means over different items need a weight_fn of each, a mapping for several. Or "
            "build(..., check_loss=False)"
        )
        return True

    def _wrong(
        self, gradients: Sequence[Gradients | None], precisions: Sequence[torch.dtype]
    ) -> tuple[str, float] | None:
        known = [each for each in gradients if each is not None]
        dtypes = [each.dtype for each in self._plan.trained()]
        found = wrong_gradient(known, dtypes, precisions) if known else None
        return None if found is None else (self._names[found[0]], found[1])

    def _judge_collectives(
        self, every: Sequence[Found], number: int, precisions: Sequence[torch.dtype]
    ) -> None:
        """Refuse a loss over all ranks that depends on which rank has which rows."""
        self.text = "is of the whole batch: it calls collectives"
        pairs = [pair for each in every for pair in (each.in_turn, each.moved) if pair]
        got = self._dealt(pairs, every, precisions)
        if not got:
            self.text += ", and is the same however rows are dealt to ranks" if pairs else ""
            return
        self.is_open = False
        raise LossError(
            "step: loss_fn must give the same however the rows of a batch are dealt to ranks, got "
            f"{got} in batch {number} for the same rows, dealt in two ways. The step weighs the loss of each "
            "rank by weight_fn and adds up: return the mean over the rank's own items, without a count "
            "over ranks, let weight_fn count what it divides by, or build(..., check_loss=False)"
        )

    def _dealt(
        self,
        pairs: Sequence[tuple[Sequence[Cut], Gradients | None]],
        every: Sequence[Found],
        precisions: Sequence[torch.dtype],
    ) -> str:
        """Describe how two deals of the same rows differ; return "" if they agree."""
        cuts = [cut for of_rank, _ in pairs for cut in of_rank]
        wrong = next((cut for cut in cuts if "sum" not in every[0].fitting([cut])), None)
        if wrong is not None:
            return f"{wrong.whole:.6g} and {wrong.losses[0]:.6g}"
        gradient = self._wrong([each for _, each in pairs], precisions)
        if gradient is None:
            return ""
        return f"a gradient of {gradient[0]} that differs by {gradient[1]:.2g} of its norm"

    def _judge_metrics(self, every: Sequence[Found]) -> None:
        """Warn about metrics that are not means, but functions of a mean."""
        found = {name: pair for each in every for name, pair in each.metrics.items()}
        if not found or "metrics" in self._warned:
            return
        self._warned.add("metrics")
        pairs = {name: pair for name, pair in found.items() if name.startswith(COUNTED)}
        if pairs:
            name, (whole, parts) = next(iter(pairs.items()))
            self._warn(
                "step: loss_fn should return a count of the items of its own rows, got a mean of "
                f"{name.removeprefix(COUNTED)!r} of {whole:.6g} for a batch and {parts:.6g} by its "
                "parts, whose sums agree; so the result depends on the number of ranks and "
                "micro-batches. Count the part's own items, or build(..., check_loss=False)"
            )
            return
        self._warn(wrong_metrics("step", found))

    def _judge_writes(self, every: Sequence[Found]) -> bool:
        """Refuse, or warn about, writes that depend on the cut; return whether there are any."""
        every_write = _of_all_ranks([each.writes for each in every])
        bearing = {name: write for name, write in every_write.items() if self._bears(write)}
        writes = {name: write for name, write in bearing.items() if name not in self._warned}
        trained = {name for name, each in writes.items() if each.kind == "parameter"}
        trained &= {*self._names}
        names = ", ".join([*writes][:_SHOWN])
        saved = self._is_over_ranks or any(each.kind != "attribute" for each in writes.values())
        if self._plan.having("virtual_ranks") and writes and saved:
            raise PlanError(
                "step: reproducible's model must change no buffers, parameters or attributes that it reads "
                f"in its forward, which on each rank is that of other samples, got {names}; give buffers "
                "persistent=False where they do not count, or write in the loop"
            )
        if trained:
            raise PlanError(
                "step: model must not write to parameters in its forward, which on each rank and "
                f"micro-batch is that of other samples, got {', '.join(sorted(trained))}; write in the "
                "loop, initialise before build, or build(..., check_loss=False)"
            )
        if writes:
            self.warn_of_writes([*writes])
        if self._is_over_ranks:
            self.sums = [name for name, each in every_write.items() if each.of_rows and each.is_sum]
        return bool(bearing)

    def warn_of_writes(self, names: Sequence[str]) -> None:
        """Warn about values that a forward computes from its rows and writes to the model."""
        self._warned.update(names)
        self._warn(
            "step: model should write the same in its forward however a batch is cut, got "
            f"{', '.join(names[:_SHOWN])}, written in the forward of each rank and micro-batch by its own "
            "rows, and kept for later ones; write in the loop, once an update, add up over ranks with "
            "reduce_sum in the forward, or leave out accumulate"
        )

    def _bears(self, write: Write) -> bool:
        """Return whether a write depends on how the plan cuts a batch, and is saved or read later."""
        is_reproducible = bool(self._plan.having("virtual_ranks"))
        by_parts = write.of_parts and (is_reproducible or self._is_in_microbatches)
        by_rows = write.of_rows and (is_reproducible or self._is_over_ranks)
        if write.kind == "attribute":
            return (by_parts and write.reads.parts) or (by_rows and write.reads.rows)
        return (by_parts or by_rows) and not write.is_sum

    def _warn_of_state(self, cut: Cut) -> None:
        self.is_open = False
        got = f"{cut.whole:.6g}, then {cut.losses[0]:.6g}"
        self.text = f"differs from run to run: {got}"
        self._warn(
            "step: loss_fn should return the same loss for the same batch, got "
            f"{got}: it keeps state outside of the model, and comparing the loss with "
            "those of its parts has moved that; use build(..., check_loss=False)"
        )

    def _warn(self, text: str) -> None:
        if self._is_main and self._cuts_rows and self.has_rows:
            warn_user(text)


def _of_all_ranks(every: Sequence[Mapping[str, Write]]) -> dict[str, Write]:
    """Join the writes of all ranks, by name."""
    found: dict[str, list[Write]] = {}
    for of_rank in every:
        for name, write in of_rank.items():
            found.setdefault(name, []).append(write)
    return {
        name: Write(
            writes[0].kind,
            of_parts=any(each.of_parts for each in writes),
            of_rows=any(each.of_rows for each in writes) or len({w.bits for w in writes}) > 1,
            reads=Reads(
                parts=any(each.reads.parts for each in writes),
                rows=any(each.reads.rows for each in writes),
            ),
        )
        for name, writes in found.items()
    }


def wrong_metrics(function: str, found: dict[str, tuple[float, float]]) -> str:
    """Return the warning for metrics that differ between a batch and its parts."""
    some = [
        f"{name}: {whole:.6g} for a batch, {parts:.6g} by its parts"
        for name, (whole, parts) in found.items()
    ]
    return (
        f"{function}: metrics should be means over the items of a batch, got others, which depend on the "
        f"number of ranks, micro-batches and batches: {'; '.join(some[:_SHOWN])}; return a pair "
        "(sum, count), or compute a function of a mean, such as a root or exp, from the report"
    )


def _cuts_rows(split: Any) -> bool:
    """Return whether a `split` function cuts rows, or takes micro-batches whose rows can be cut."""
    is_window = "takes_windows" in getattr(split, "traits", ())
    return is_window or hasattr(split, "num_parts") or "num_parts" in getattr(split, "keywords", ())


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _numbers(values: Sequence[float]) -> str:
    *first, last = [f"{value:.6g}" for value in values]
    return f"{', '.join(first)} and {last}" if first else last


def _listed(batches: Sequence[int]) -> str:
    *first, last = map(str, batches)
    return f"batches {', '.join(first)} and {last}" if first else f"batch {last}"
