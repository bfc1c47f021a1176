"""The axes of a rank in a mesh, with the process group of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from accel_fn.core.mesh_axes import ranks_along
from accel_fn.core.primitives import group_of, nccl_of
from accel_fn.core.state import Axis, DistState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MakeGroup = Callable[[DistState, str, range], "ProcessGroup | None"]
"""Called for each set of ranks along each axis, in one order on all ranks; returns this rank's end."""


def make_axes(state: DistState, shape: Mapping[str, int], make: MakeGroup) -> tuple[Axis, ...]:
    """Make this rank's axes of a mesh of this shape."""
    axes = []
    for name, size in shape.items():
        own, group = ranks_along(shape, name, state.rank), None
        if size == state.world_size:
            group = state.group
        elif size > 1:
            rows = dict.fromkeys(ranks_along(shape, name, rank) for rank in range(state.world_size))
            groups = {row: make(state, name, row) for row in rows}
            group = groups[own]
        axes.append(Axis(name, own.index(state.rank), size, group))
    return tuple(axes)


def make_subgroup(
    state: DistState, name: str, ranks: range, *, backend: str, timeout_s: float
) -> ProcessGroup | None:
    """Make a group of some processes of a world; every rank calls this, also for groups without it."""
    timeout = timedelta(seconds=timeout_s)
    group: ProcessGroup = dist.new_group(
        list(ranks), timeout=timeout, backend=backend, group_desc=name
    )
    if state.rank not in ranks:
        return None
    nccl = nccl_of(group_of(state, "init"))
    if nccl is not None:
        # Longer than the others, so that the watchdog prints its report before NCCL ends the process.
        nccl_of(group)._set_default_timeout(nccl.options._timeout)
    return group
