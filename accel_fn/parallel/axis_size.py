"""The number of ranks over which a transform divides a model or its batches."""

from __future__ import annotations

import sys

from accel_fn.core.mesh_axes import mesh_name
from accel_fn.core.state import DistState, mesh_of
from accel_fn.errors import PlanError, message


def axis_size(transform: str, state: DistState, axis: str) -> int:
    """Return the number of ranks along an axis; refuse several ranks that form no mesh.

    In a mesh, an axis that is left out has one rank.
    """
    mesh = mesh_of(state)
    if axis in mesh or state.axes or state.world_size == 1:
        return mesh.get(axis, 1)
    # Suggest the smallest axis that the ranks can form.
    size = next(n for n in range(2, state.world_size + 1) if state.world_size % n == 0)
    launch = f"accel-fn launch -n {state.world_size} --mesh dp=-1,{axis}={size} {_script()}"
    repair = f'use init(mesh={{"dp": -1, "{axis}": {size}}}), or start it by: {launch}'
    raise PlanError(
        message("build", f"{transform}'s mesh", f"have an axis {axis!r}", mesh_name(mesh), repair)
    )


def _script() -> str:
    """Return the script that this process runs; `train.py` if it does not run a file."""
    return sys.argv[0] if sys.argv[0].endswith(".py") else "train.py"
