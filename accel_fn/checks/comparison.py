"""Compare a few rows of a batch with parts of these rows: losses, gradients, metrics and writes.

`parts` cuts the rows, `look` and `deals` run rows and parts on each rank, and `verdicts` judges the
findings and writes the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from accel_fn.checks.deals import Deals
from accel_fn.checks.draws import CannotReplayError
from accel_fn.checks.findings import (
    Found,
)
from accel_fn.checks.look import compare
from accel_fn.checks.parts import (
    Parts,
    Rows,
    collated_samples,
    few_rows,
    prepared,
)
from accel_fn.checks.trial import couples
from accel_fn.checks.verdicts import Verdicts
from accel_fn.core import primitives
from accel_fn.core.loop import Strategy
from accel_fn.core.microbatches import in_microbatches
from accel_fn.core.plan import Plan
from accel_fn.core.state import DistState
from accel_fn.core.torch_internals import is_memory
from accel_fn.errors import AccelError, StateError
from accel_fn.parallel.same_on_all_ranks import fingerprints

_MOST_FAILURES = 10
_TOO_FEW = "no batch has had two samples"
_NO_PARTS = "all but one part of each batch weigh nothing, or a loss is not finite"
_OF_LOOKS = (
    ("thirds", "in turn"),
    ("halves", "unequal"),
    ("in turn", "thirds"),
    ("unequal", "halves"),
)
"""The two ways in which each of four comparisons cuts the rows. The fifth begins with the first
pair again."""


class Comparison:
    """Compares rows of some batches with their parts: losses, metrics, gradients and writes."""

    def __init__(
        self, state: DistState, plan: Plan, strategy: Strategy, *, check_loss: bool
    ) -> None:
        self._plan = plan
        self._strategy = strategy
        self._is_on = check_loss and is_cut(state, plan)
        self._num_failures = self._num_looks = 0
        self.is_due = False
        """Whether to compare the next batch, because this one could not be compared or was refused."""
        self.has_one_value_a_row = False
        """Whether a BatchNorm in training has no variance for one row; equal on all ranks."""
        self.verdicts = Verdicts(state, plan, is_on=check_loss, is_cut=self._is_on)

    @property
    def verdict(self) -> str:
        """Return the result of the comparison, as text for `explain`."""
        return self.verdicts.text

    def look(self, state: DistState, batch: Any, number: int, *, leaves_out: bool = False) -> None:
        """Compare a batch with its parts, with the same result on all ranks: refuse, or warn once.

        With `leaves_out`, the ranks have already found that rows of the batch are not samples. Do
        not compare the batch then: every cut would show the same fault.
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
        # If `judge` raises, the check stays due: the next batch is compared too.
        self.is_due = True
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
        """Compare a batch with parts of its rows; return the findings, or the reason for none."""
        is_window = bool(self._plan.having("takes_windows")) and type(batch) is list
        self.verdicts.has_rows = not (is_window and any(type(each) is list for each in batch))
        if self._plan.having("takes_windows") and not isinstance(of_samples, str):
            return "micro-batches that a loader has collated are not cut"
        try:
            rows = few_rows(self._plan, self._strategy, state, batch, leaves_out=leaves_out)
        except AccelError as error:
            # All ranks raise the same error, so all of them return here.
            return f"its rows cannot be joined: {error}"
        return _TOO_FEW if rows is None else self._compared(state, rows)

    def _check_sums(self, state: DistState) -> None:
        """Warn about buffers that hold sums over rows, if ranks hold different sums."""
        names, self.verdicts.sums = self.verdicts.sums, []
        buffers = dict(self._plan.model.named_buffers())
        found = [buffers[name].detach().contiguous() for name in names if name in buffers]
        every = primitives.exchange(fingerprints(found) if found else [], state, "step")
        if any(each != every[0] for each in every):
            self.verdicts.warn_of_writes(names)

    def _compared(self, state: DistState, rows: Rows) -> Sequence[Found] | str:
        """Compare rows with their cuts on all ranks; return the findings, or the reason for none."""
        plan, strategy = self._plan, self._strategy
        names = _OF_LOOKS[self._num_looks % len(_OF_LOOKS)]
        cuts: list[Parts] = []
        failure = ""
        try:
            rows, cuts = prepared(rows, names, most=1 if couples(plan, strategy) else 2)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}, where a few rows are cut or collated"
        # Exchange failures before any forward. Without the exchange, the other ranks would wait in
        # a forward for a rank without parts. Simulated ranks have a second reason: they are threads
        # with shared generators, and collate_fn runs with other states of these generators. A
        # forward on another rank at that time would seem to draw numbers.
        if couples(plan, strategy) or rows.collate is not None:
            failure = next(filter(None, primitives.exchange(failure, state, "step")), "")
        found = partial(compare, plan, strategy, state, rows, cuts, failure)
        every = _on_all_ranks(state, strategy, found)
        if not isinstance(every, str) and any(each.calls_collectives for each in every):
            writes = [each.writes for each in every]
            narrow = any(each.has_one_value_a_row for each in every)
            is_counted = any(each.is_counted for each in every)
            dealt = Deals(state, plan, strategy, rows, is_counted=is_counted)
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
    """Return whether a batch is computed in parts, on several ranks or in micro-batches."""
    return state.world_size > 1 or in_microbatches(plan)


def _on_all_ranks(
    state: DistState, strategy: Strategy, compare: Callable[[], Found]
) -> Sequence[Found] | str:
    """Call `compare` on all ranks; return their findings, or the reason why one rank has no findings."""
    mine: Found | str
    lost: StateError | None = None
    try:
        mine = compare()
    except CannotReplayError as reason:
        mine = str(reason)
    except StateError as error:
        # The writes of the forward could not be undone, so all ranks must raise.
        mine, lost = str(error), error
    except Exception as error:
        # Do not raise here: if the same error occurs in training, the step reports it.
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
