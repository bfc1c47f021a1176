"""Batches as trees of tensors: walk, map, place and count them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.utils import _pytree as pytree

from accel_fn.base.mappings import opened
from accel_fn.base.samples import Samples
from accel_fn.base.state import DistState, check_state
from accel_fn.errors import BatchError

T = TypeVar("T")
ATOMS = (str, bytes, int, float, bool, type(None))
_WEIGHT_FN = "give Plan a weight_fn and accumulate a split for such data"


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply `fn` to every tensor of `tree`; keep everything else.

    Tuples, lists and dicts are walked here, several times faster than by torch's pytree,
    which walks all other registered classes. A `Mapping` of any other class is walked too.
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    kind = type(tree)
    if kind is tuple:
        return tuple([map_tensors(fn, child) for child in tree])
    if kind is list:
        return [map_tensors(fn, child) for child in tree]
    if kind is dict:
        return {key: map_tensors(fn, child) for key, child in tree.items()}
    if kind in ATOMS:
        return tree
    return pytree.tree_map_only(Tensor, fn, opened(tree))


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in pytree order."""
    return _leaves(tree, Tensor)


def columns_of(tree: Any) -> list[Tensor | Samples[Any]]:
    """Return what holds one row a sample: tensors, and `samples`, whose own tensors are parts of rows."""
    return _leaves(tree, (Tensor, Samples))


def _leaves(tree: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    """Return the parts of a tree that are of these kinds, in pytree order."""
    kind = type(tree)
    if kind is tuple or kind is list or kind is dict:
        found: list[Any] = []
        for child in tree.values() if kind is dict else tree:
            found += [child] if isinstance(child, kinds) else _leaves(child, kinds)
        return found
    if isinstance(tree, kinds):
        return [tree]
    if kind in ATOMS:
        return []
    nodes = pytree.tree_leaves(opened(tree), is_leaf=lambda node: isinstance(node, kinds))
    return [node for node in nodes if isinstance(node, kinds)]


def to_device(tree: T, state: DistState) -> T:
    """Move the tensors of a tree to the state's device, as `place` moves a batch.

    Args:
        tree: tensors in tuples, lists, dicts, any `Mapping`, and classes that torch's pytree knows;
            everything else is kept.
        state: of this rank.

    Returns:
        The same tree; `tree` itself if its tensors are on the device already.

    Cost: a copy for each tensor that is elsewhere. A copy to an accelerator from pinned memory
    overlaps with its work.

    >>> import torch, accel_fn as af
    >>> af.extend.to_device({"image": torch.zeros(2), "name": "a"}, af.DistState())
    {'image': tensor([0., 0.]), 'name': 'a'}
    """
    check_state("to_device", state)
    device = state.device
    elsewhere = [tensor for tensor in tensors_of(tree) if tensor.device != device]
    if not elsewhere:
        return tree
    overlap = device.type != "cpu"  # a copy to the host that nobody waits for is read too early

    def to(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=overlap)

    return cast("T", map_tensors(to, tree))


def count_samples(batch: Any) -> int:
    """Count the samples of a batch: the leading dimension that all its tensors share.

    Of `samples` the items count, and no tensor inside of them. 0-dim tensors and non-tensors
    do not count, and None is a batch without samples. This is the default `weight_fn` of a plan:
    every sample weighs the same.

    Args:
        batch: a tree of tensors, each [num_samples, ...], and of `samples`.

    Returns:
        The number of samples, >= 0.

    Raises:
        ValueError: no tensor has a leading dimension, or two disagree in it.

    Cost: reads shapes only.

    >>> import torch, accel_fn as af
    >>> af.count_samples({"image": torch.zeros(8, 3, 4, 4), "label": torch.zeros(8)})
    8
    """
    if batch is None:
        return 0
    count = -1
    for column in columns_of(batch):
        if isinstance(column, Samples):
            size = len(column)
        elif column.ndim:
            size = column.size(0)
        else:
            continue
        if size != count:
            if count >= 0:
                _refuse_ragged(batch)
            count = size
    if count < 0:
        raise BatchError(
            "count_samples: batch must hold a tensor with a leading dimension, "
            f"got {type(batch).__name__}; register such a class with torch's pytree, mark a list "
            f"of samples by af.samples, or {_WEIGHT_FN}"
        )
    return count


def _refuse_ragged(batch: Any) -> None:
    raise BatchError(
        "count_samples: batch must hold tensors of one leading dimension, "
        f"got shapes {shapes_of(batch)}; mark a list of samples by af.samples, or {_WEIGHT_FN}"
    )


def shapes_of(batch: Any) -> list[tuple[int, ...]]:
    """Return the shapes of all that counts: of tensors with rows, and of `samples` as (length,)."""
    columns = columns_of(batch)
    shapes = [(len(c),) if isinstance(c, Samples) else tuple(c.shape) for c in columns]
    return [shape for shape in shapes if shape]


def rows_of(batch: Any) -> int | None:
    """Count the rows of a batch by the first of its tensors, or `samples`, that has a dimension.

    None: it is None, or it holds `samples` without items, and no rows beside them.
    """
    if batch is None:
        return None
    columns = columns_of(batch)
    if Samples in map(type, columns) and all(0 in shape for shape in shapes_of(batch)):
        return None
    for column in columns:
        if isinstance(column, Samples):
            return len(column)
        if column.ndim:
            return column.size(0)
    return 0
