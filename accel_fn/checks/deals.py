"""Check a loss that calls collectives: deal the rows to ranks in several ways, and compare the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accel_fn.checks.draws import CannotReplayError
from accel_fn.checks.findings import (
    Cut,
    Found,
    Gradients,
    loss_tolerance,
)
from accel_fn.checks.look import of_term, times
from accel_fn.checks.parts import (
    Rows,
    joined,
)
from accel_fn.checks.trial import Trial
from accel_fn.core import primitives
from accel_fn.core.batch import count_samples
from accel_fn.core.dtensor import local
from accel_fn.core.loop import Strategy
from accel_fn.core.microbatches import in_microbatches
from accel_fn.core.plan import Plan
from accel_fn.core.split_batch import interleaved_parts, part_sizes, split_rows
from accel_fn.core.state import DistState, over
from accel_fn.core.weights import shares, total_weight, weigh


class Deals:
    """Distributes the rows of all ranks in three ways: in order, in turn, and with one row moved.

    A deal is one distribution of the rows to the ranks.
    """

    def __init__(
        self,
        state: DistState,
        plan: Plan,
        strategy: Strategy,
        rows: Rows,
        *,
        is_counted: bool = False,
    ) -> None:
        self._is_sum = is_counted or plan.reduction == "sum"
        self._state, self._plan, self._strategy = state, plan, strategy
        self._ranks = over(state)
        self._rows = rows

    def compare(self) -> Found:
        """Run the deals, and compare losses and gradients over the ranks."""
        state, plan = self._state, self._plan
        batch = joined(self._rows.batch, state)
        num, size = count_samples(batch), self._ranks.world_size
        sizes = part_sizes(num, size)
        # There is nothing to compare on one rank, with too few rows, or if ranks train separately.
        # A step with micro-batches refuses collectives with gradients.
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
        """Run two deals of the same rows; return the losses, and the gradient norms after each deal."""
        trial.forget()
        size = float(self._ranks.world_size)
        # The backward of FSDP averages gradients, so multiply both deals by the number of ranks.
        # Other gradients are added up over the ranks after each run, and the second sum then counts
        # the result of the first one once for each rank. So multiply the second deal by the number
        # of ranks too, and divide its sum by this number.
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
        """Run one deal of the rows; return the loss over all ranks, for each term."""
        plan, ranks = self._plan, self._ranks
        mine = parts[ranks.rank]
        (weight,) = weigh(plan.weight_fn, [mine])
        total = total_weight(primitives.exchange(weight, ranks, "step"))
        share = ((1.0,) if weight else ()) if self._is_sum else shares(weight, total)
        seed = times(share, factor)
        ran = trial.run(mine, weight, seed if self._strategy.leaves_gradients else None)
        if trial.draws.has_any:
            raise CannotReplayError("it calls collectives, and draws random numbers")
        of_ranks = primitives.exchange((ran.losses, share), ranks, "step")
        return [
            sum(losses[place] * of_term(each, place) for losses, each in of_ranks)
            for place in range(len(ran.losses))
        ]

    @property
    def _averages(self) -> bool:
        """Return whether the backward averages gradients over the ranks."""
        return bool(self._plan.having("shards"))

    def _sum_gradients(self, mean_over: int = 1) -> None:
        """Add up gradients over the ranks, unless the backward averages them; divide by `mean_over`."""
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
