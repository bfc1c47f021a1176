"""What the library's own tests look at or break beyond the public names, on one page.

Nothing here is for users: names and meaning change with the code. When a file of the library
moves, this page is what follows it, and no test does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from accel_fn.base import rng
from accel_fn.base.state import DistState
from accel_fn.checkpoint import background, new_checkpoint
from accel_fn.checkpoint.format import hashing, write
from accel_fn.observe import progress
from accel_fn.step.step import Step
from accel_fn.testing import simulation
from accel_fn.transforms.local_sgd import average_ranks

# ---- step

# ---- ranks

exclusive_random = rng.exclusive_random
"""Lets one simulated rank alone use the random generators, and restores them."""

derive_random = rng.derive_random
"""Seeds the random generators of a rank that the saved run did not have."""


@contextmanager
def simulations_apart(**limits: int) -> Iterator[None]:
    """Run simulations apart from those of other tests; join what is left of them at the end.

    `max_lost_sockets` and `max_idle_sockets` bound what failed and waiting worlds may hold open.
    """
    changed: dict[str, Any] = {f"_{name.upper()}": value for name, value in limits.items()}
    changed |= {"_lost": simulation._LostThreads(), "_idle": simulation._IdleWorlds()}
    with mock.patch.multiple(simulation, _UNUSED_S=0.1, **changed):
        yield
        simulation._lost.join_oldest()
        simulation._idle.take((1, 1.0, ()))


# ---- data

# ---- transforms

average_over_ranks = average_ranks.average
"""Replaces tensors by their weighted mean over the ranks, as `local_sgd` does."""

# ---- checkpoint


def finish_saving(state: DistState, step: Step) -> None:
    """Wait for the save in the background; if it failed on one rank, all raise."""
    background.finish_writing(step.notes, state, "save")


@contextmanager
def saves_killed_after(num_files: int) -> Iterator[None]:
    """Kill each save after some files: half of the next one is written, and nothing is cleaned up."""
    write_file, left = hashing.write_file, itertools.count(num_files, -1)

    def writing(path: Path, *arguments: Any) -> Any:
        if next(left) <= 0:
            path.write_bytes(b"half")
            raise OSError("killed")
        return write_file(path, *arguments)

    with (
        mock.patch.object(write, "write_file", writing),
        mock.patch.object(new_checkpoint, "write_file", writing),
        mock.patch.object(new_checkpoint.NewCheckpoint, "discard"),
    ):
        yield


# ---- observe

ShownEpoch = progress.ShownEpoch
"""What `progress` makes of an epoch."""
