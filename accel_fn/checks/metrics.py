"""Check that metrics which are averaged over a loader are means, and not functions of means."""

from __future__ import annotations

from typing import Any

from accel_fn.checks.findings import agree, loss_tolerance
from accel_fn.checks.look import metrics_of, ones_of
from accel_fn.checks.parts import halves_of
from accel_fn.checks.trial import Outputs, Trial, couples
from accel_fn.checks.verdicts import wrong_metrics
from accel_fn.core.loop import Strategy
from accel_fn.core.plan import Plan
from accel_fn.core.primitives import num_collectives
from accel_fn.core.state import DistState
from accel_fn.core.warn import warn_user


class MetricsLook:
    """Checks one batch of a pass on the main rank; warns once about metrics that are not means.

    In a world of one, a pass over a single batch is exact, so the second batch is checked.
    """

    def __init__(
        self, plan: Plan, strategy: Strategy, state: DistState, outputs: Outputs | None
    ) -> None:
        self._plan, self._strategy, self._state = plan, strategy, state
        self._outputs = outputs
        self._left = 1 if state.world_size > 1 else 2
        if not state.is_main or couples(plan, strategy):
            # Only the main rank checks. If forwards have collectives, no rank checks: all ranks
            # would have to run the same forwards.
            self._left = 0
        self._num_collectives = self._count()

    def _count(self) -> int | None:
        group = self._state.group
        return 0 if group is None else num_collectives(group)

    def after(self, batch: Any, *, has_means: bool) -> None:
        """Check a batch, after its metrics were counted."""
        if self._left == 0 or not has_means:
            return
        halves = halves_of(self._plan, self._strategy, batch)
        if halves is None:
            return
        self._left -= 1
        # Skip the check if the loss has called collectives: other ranks would not join the
        # collectives of extra forwards.
        if self._left or self._num_collectives is None or self._count() != self._num_collectives:
            return
        found = self._compare(*halves)
        if found:
            warn_user(wrong_metrics("evaluate", found))

    def _compare(self, rows: Any, parts: Any, weights: Any) -> dict[str, tuple[float, float]]:
        """Return the metrics that differ between rows and their halves; {} if a run fails."""
        trial = Trial(self._plan, self._strategy, self._state, self._outputs)
        ones = ones_of(self._plan)
        try:
            trial.draws.record(whole=True)
            whole = trial.run(rows, ones, None)
            if trial.draws.has_any:
                trial.draws.record(whole=False)
                trial.run(parts[0], ones, None)
                trial.draws.check_alike()
                whole = trial.run(rows, ones, None)
            ran = [
                trial.run(part, weight, None) for part, weight in zip(parts, weights, strict=True)
            ]
            tolerance = loss_tolerance(whole.dtype, trial.dtypes())
        except Exception:
            # Report nothing: the pass itself raises this error too, unless the loss refuses only
            # these parts.
            return {}
        finally:
            trial.close()
        pairs = metrics_of(whole, ran, weights)
        return {name: each for name, each in pairs.items() if not agree(each, tolerance)}
