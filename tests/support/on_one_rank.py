"""A request to stop, or a failure before the first forward, on one rank of four at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import accel_fn as af
from tests.support import strategies as ours

WHATS = "batch", "weight_fn", "split", "should_stop", "stop"


def learned(
    state: af.DistState, recipe: ours.Recipe, batch: Any, ranks: Iterable[int], **given: Any
) -> tuple[list[bool], dict[str, Any]]:
    """Return what this rank learns of each, and the parameters after one more step for each rank.

    Of a stop, whether it is reported; of a failure, whether the error is its own, not of another rank.
    """
    now = "", 0  # what happens, and on which rank

    def fails(what: str) -> None:
        if now == (what, state.rank):
            raise ZeroDivisionError

    def weight_fn(batch: Any) -> int:
        fails("weight_fn")
        return len(batch[0])

    def split(batch: Any) -> list[Any]:
        fails("split")
        return [batch]

    def should_stop() -> bool:
        fails("should_stop")
        return now == ("stop", state.rank)

    def failing(plan: af.Plan) -> af.Plan:
        return replace(recipe(plan), split=(split,), should_stop=(should_stop,))

    state, step = ours.built(failing, state, weight_fn=weight_fn, **given)
    found = []
    for rank in ranks:
        for what in WHATS:
            now = what, rank
            mine = 3 if now == ("batch", state.rank) else af.shard_batch(batch, state)
            try:
                state, report = step(state, mine)
                found.append(report.extras["stop"])
            except Exception as error:
                found.append("another rank could not" not in str(error))
        now = "", 0
        state, report = step(state, af.shard_batch(batch, state))
        assert report.extras["stop"] is False
    return found, ours.whole(step.plan.model.state_dict())


def expected(rank: int, ranks: Iterable[int]) -> list[bool]:
    """What a rank has to learn: a failure is raised on all, on the rank that failed by its own error."""
    return [what == "stop" or own == rank for own in ranks for what in WHATS]
