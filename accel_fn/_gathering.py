"""gather: the rows of all ranks joined, in data-set order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import einops
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accel_fn import _comm
from accel_fn._errors import BatchError
from accel_fn._state import DistState

T = TypeVar("T")


def gather(tree: T, state: DistState) -> T:
    """Join the rows of all ranks, on all ranks, in data-set order.

    Ranks hold consecutive parts of a batch that `shard_loader` cut, so joining
    them in rank order restores the order of the data set. Leading dimensions
    may differ between ranks, and may be 0.

    Args:
        tree: a tree of tensors [num_rows, ...] and lists of picklable things,
            of one structure on all ranks; trailing dimensions and dtypes agree.
        state: of this rank.

    Returns:
        The same tree with tensors [sum of num_rows, ...] and joined lists.
        In a world of one, `tree` itself.

    Raises:
        ValueError: on every rank alike, before any data moves: structures,
            dtypes or trailing dimensions differ, or a leaf has no rows to join.

    Cost: two small collectives for shapes and lists, then one all-gather per
    dtype, of world_size times the largest part; one host synchronisation.

    >>> import torch, accel_fn as af
    >>> af.gather(torch.arange(3), af.DistState())
    tensor([0, 1, 2])
    """
    if state.world_size == 1:
        return tree
    leaves, structure = pytree.tree_flatten(tree, is_leaf=_is_plain_list)
    described = (str(structure), [_describe(leaf) for leaf in leaves])
    every = _comm.exchange(described, state, "gather")
    _check_alike(every)
    joined: list[Any] = [None] * len(leaves)
    for places in _by_dtype(leaves).values():
        rows = [[entry[1][place]["rows"] for place in places] for entry in every]
        for place, whole in zip(
            places, _gather_tensors([leaves[place] for place in places], rows, state), strict=True
        ):
            joined[place] = whole
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, list):
            joined[place] = [item for entry in every for item in entry[1][place]["items"]]
    return cast("T", pytree.tree_unflatten(joined, structure))


def _is_plain_list(node: Any) -> bool:
    return type(node) is list and not any(
        isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(node)
    )


def _describe(leaf: Any) -> dict[str, Any]:
    """What peers must know of a leaf: its kind, on which they must agree, and its rows or items."""
    if isinstance(leaf, Tensor) and leaf.ndim:
        return {"kind": f"{leaf.dtype} [rows, {list(leaf.shape[1:])}]", "rows": leaf.size(0)}
    if isinstance(leaf, list):
        return {"kind": "list", "items": leaf}
    name = "0-dim tensor" if isinstance(leaf, Tensor) else type(leaf).__name__
    return {"kind": name, "refused": True}


def _check_alike(every: Sequence[tuple[str, list[dict[str, Any]]]]) -> None:
    """The same verdict on every rank: may these trees be joined?"""
    structure, first = every[0]
    for rank, (other, leaves) in enumerate(every):
        kinds, theirs = [leaf["kind"] for leaf in first], [leaf["kind"] for leaf in leaves]
        if other != structure or kinds != theirs:
            what = f"{theirs} on rank {rank} and {kinds} on rank 0"
            if kinds == theirs:
                what = f"{other} on rank {rank} and {structure} on rank 0"
            raise BatchError(
                "gather: tree must have one structure, and one dtype and trailing shape a leaf, "
                f"on every rank, got {what}"
            )
    for leaf in first:
        if leaf.get("refused"):
            raise BatchError(
                "gather: tree must hold tensors with a leading dimension and lists, "
                f"got a {leaf['kind']}; use reduce_sum or reduce_mean for numbers"
            )


def _by_dtype(leaves: Sequence[Any]) -> dict[torch.dtype, list[int]]:
    places: dict[torch.dtype, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            places.setdefault(leaf.dtype, []).append(place)
    return places


def _gather_tensors(
    tensors: Sequence[Tensor], rows: Sequence[Sequence[int]], state: DistState
) -> list[Tensor]:
    """Tensors of one dtype in one all-gather: flattened, padded to the longest, cut again."""
    flat, shapes = einops.pack([tensor.detach().to(state.device) for tensor in tensors], "*")
    widths = [
        tensor[:1].numel() if tensor.size(0) else tensor.new_empty(tensor.shape[1:]).numel()
        for tensor in tensors
    ]
    lengths = [sum(n * width for n, width in zip(counts, widths, strict=True)) for counts in rows]
    padded = flat.new_zeros(max(lengths))
    padded[: flat.numel()] = flat
    parts = _comm.all_gather(padded, state, "gather")
    cut = [
        einops.unpack(
            part[:length], [(n, *shape[1:]) for n, shape in zip(counts, shapes, strict=True)], "*"
        )
        for part, length, counts in zip(parts, lengths, rows, strict=True)
    ]
    return [torch.cat(pieces) for pieces in zip(*cut, strict=True)]
