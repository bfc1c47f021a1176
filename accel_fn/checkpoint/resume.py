"""resume: the newest checkpoint of a folder, or a new run where there is none yet."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from accel_fn.checkpoint.argument_checks import check_call
from accel_fn.checkpoint.format.names import name_of, reading, steps_in
from accel_fn.checkpoint.load import load
from accel_fn.checkpoint.run_state import named_steps
from accel_fn.checkpoint.schedules import Choice, Match, check_choice, check_match
from accel_fn.core.collectives import all_or_none
from accel_fn.core.primitives import exchange
from accel_fn.core.state import DistState, check_state, check_world
from accel_fn.core.step import Step

_LOG = logging.getLogger(__name__)


def resume(
    step: Step | Mapping[str, Step],
    state: DistState,
    folder: str | os.PathLike[str],
    extras: Mapping[str, Any] | None = None,
    *,
    schedule: Choice = None,
    match: Match = "program",
) -> DistState:
    """Load the newest checkpoint of a folder; return the state itself if there is none.

    Called on every rank, of a world of any size. Rank 0 looks for checkpoints, so all ranks
    load, or none. The main rank logs the checkpoint and its step, as a warning, which Python
    shows by default. The next line of a program is `loader.epochs(num_epochs, since=state)`: of a
    run that has finished, it yields no epoch and logs that.

    Args:
        step: the step, or a dict of steps by name, as it is saved.
        state: as `build` returned it.
        folder: that `save` is given; need not be there.
        extras: by the names that they are saved under; the loader among them.
        schedule: as for `load`: "program" or "saved" for a run that goes on with more epochs.
        match: as for `load`: "names" for a program with other parameters, groups or transforms.

    Returns:
        What `load` returns, or `state`.

    Raises:
        RuntimeError: on every rank, as in `load`: the newest checkpoint is damaged, or the program differs.
        ValueError: on every rank: an argument breaks its rule or differs between ranks, in a new run too.

    Cost: a few small collectives, and `load` where there is a checkpoint.

    >>> import tempfile, accel_fn as af
    >>> state, step = af.build(af.Plan(loss_fn, model, optimizer), af.DistState())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = af.resume(step, state, folder)  # a new run: step 0
    ...     state, _ = step(state, batch)
    ...     path = af.save(step, state, folder)
    ...     af.resume(step, state, folder).step
    1
    """
    check_state("resume", state)
    check_world("resume", state)
    steps, given = named_steps(step), {} if extras is None else extras

    def check() -> None:
        check_choice("resume", schedule)
        check_match("resume", match, schedule)

    def find() -> list[int]:
        with reading(home, "resume"):
            return steps_in(home)

    home = check_call("resume", state, folder, steps, given, check, schedule=schedule, match=match)
    found = all_or_none(find, state, "resume")
    is_there = bool(exchange(found, state, "resume")[0])
    if not is_there:
        return state
    loaded = load(step, state, folder, extras=extras, schedule=schedule, match=match)
    if state.is_main:
        call = f", call {loaded.call}" if loaded.call else ""
        checkpoint = home / name_of(loaded.step)
        _LOG.warning("the run resumes at step %d%s, from %s", loaded.step, call, checkpoint)
    return loaded
