"""Checks the library's promises over the ranks of an existing world."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from accel_fn.base.state import DistState
from accel_fn.comm.backends import default_backend
from accel_fn.comm.world import init
from accel_fn.testing.selftest.laws import Promise, promises
from accel_fn.testing.selftest.results import NOT_RUN, Outcome, RankReport


def check_this_rank(folder: str) -> RankReport:
    """Join the world that the launcher's variables describe, and check all promises over it.

    Each outcome is a line of JSON in the file of this rank's number, as soon as it is known.
    """
    state = init()
    with Path(folder, str(state.rank)).open("w", encoding="utf-8", buffering=1) as file:
        return check_promises(state, lambda each: print(json.dumps(asdict(each)), file=file))


def check_promises(
    state: DistState, show: Callable[[Outcome], None] = lambda _: None
) -> RankReport:
    """Check one promise after another, on every rank of a world alike; show each as it ends.

    It ends with the first that raises an error: the other ranks may wait for
    this one in the midst of it.
    """
    outcomes: list[Outcome] = []
    for promise in promises(state):
        if outcomes and outcomes[-1].error:
            outcomes.append(Outcome(promise=promise.words, bound=promise.bound, error=NOT_RUN))
        else:
            outcomes.append(_check(promise, state))
        show(outcomes[-1])
    return RankReport(
        world_size=state.world_size,
        device=str(state.device),
        backend=default_backend(state.device, None) if state.world_size > 1 else "none",
        outcomes=outcomes,
    )


def _check(promise: Promise, state: DistState) -> Outcome:
    try:
        largest = promise.check(state)
    except Exception as error:
        told = traceback.TracebackException.from_exception(error)
        return Outcome(
            promise=promise.words,
            bound=promise.bound,
            error="".join(told.format_exception_only()).strip(),
            traceback="".join(told.format()),
            time=time.time(),
        )
    return Outcome(promise=promise.words, bound=promise.bound, largest=largest)
