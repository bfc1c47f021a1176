"""The axes of a mesh: how many ranks are along each axis, and which ones."""

from __future__ import annotations

import math
from collections.abc import Mapping

from accel_fn.errors import ArgumentError, ArgumentTypeError, check_count, message

AXES = ("pp", "dp", "cp", "tp")
"""The names of the axes of a mesh, outermost first. Ranks along the first axis are furthest from
each other. Ranks along the last axis are neighbours, and exchange most."""


def mesh_shape(function: str, mesh: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the number of ranks along each axis, outermost first; `dp` is always there.

    An omitted axis has one rank. An axis of size -1 gets all remaining ranks.
    """
    if not isinstance(mesh, Mapping):
        rule, repair = "map axes to sizes", 'such as {"dp": -1, "tp": 2}'
        raise ArgumentTypeError(message(function, "mesh", rule, mesh, repair))
    for name, size in mesh.items():
        if name not in AXES:
            raise ArgumentError(message(function, "mesh", f"have axes of {', '.join(AXES)}", name))
        if size != -1:
            check_count(
                function, f"mesh[{name!r}]", size, repair="or -1, for all that others leave"
            )
    sizes = {name: int(mesh.get(name, 1)) for name in AXES if name in mesh or name == "dp"}
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ArgumentError(message(function, "mesh", "have at most one axis of -1", dict(mesh)))
    num_fixed = math.prod(size for size in sizes.values() if size != -1)
    if world_size % num_fixed or not (free or num_fixed == world_size):
        verb = "divide" if free else "multiply to"
        repair = "an axis of -1 takes all ranks that the others leave"
        rule = f"have sizes that {verb} the number of ranks, {world_size}"
        raise ArgumentError(message(function, "mesh", rule, dict(mesh), repair))
    return {name: world_size // num_fixed if size == -1 else size for name, size in sizes.items()}


def ranks_along(shape: Mapping[str, int], name: str, rank: int) -> range:
    """Return `rank` and the ranks that differ from it along this axis only, in the axis's order."""
    names = list(shape)
    stride = math.prod(shape[inner] for inner in names[names.index(name) + 1 :])
    first = rank - rank // stride % shape[name] * stride
    return range(first, first + stride * shape[name], stride)


def mesh_name(shape: Mapping[str, int]) -> str:
    """Format a mesh for messages, such as `dp 2 x tp 2`."""
    return " x ".join(f"{axis} {size}" for axis, size in shape.items())
