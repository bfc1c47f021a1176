"""If work that each rank does by itself raises on one rank, all ranks raise, before they meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import sep
from pathlib import Path
from traceback import extract_tb

import torch

from accel_fn.base.state import DistState
from accel_fn.comm.collectives import exchange_failures
from accel_fn.errors import PeerError, WorldError


def run_or_raise_on_all(run: Callable[[], None], state: DistState) -> None:
    """Run this rank's work; if it raises on a rank, raise its error there and a PeerError on the others.

    Cost: in a world of several, one small collective on the host, and two more if a rank failed.
    """
    failure: Exception | None = None
    try:
        run()
    except Exception as error:
        failure = error
    failures = exchange_failures(state, "" if failure is None else f"{failure!r}{_place(failure)}")
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # an error that this frame holds would keep the frame, and it the error
    for rank, text in enumerate(failures):
        if text:
            raise PeerError(f"step: failed on rank {rank}: {text}")


def check_same_step(steps: Sequence[str]) -> None:
    """Refuse, on all ranks, ranks of which one caught an error of its update and repeats the step."""
    rank, step = next(
        ((r, each) for r, each in enumerate(steps) if each != steps[0]), (0, steps[0])
    )
    if rank:
        raise WorldError(
            f"step: every rank must be in the same step, got step {steps[0]} on rank 0 and "
            f"{step} on rank {rank}; a rank that catches an error of a step must not go on alone"
        )


def _place(error: Exception) -> str:
    """Return the line of the user's code that raised it, if known."""
    others = (f"{Path(__file__).parents[2]}{sep}", *(f"{each}{sep}" for each in torch.__path__))
    frames = [
        each for each in extract_tb(error.__traceback__) if not each.filename.startswith(others)
    ]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
