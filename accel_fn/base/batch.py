"""Batches as trees of tensors: mapping, counting and cutting along the leading dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accel_fn.base.state import DistState
from accel_fn.errors import BatchError

_ATOMS = (str, bytes, int, float, bool, type(None))


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply `fn` to every tensor of `tree`; keep all else.

    Tuples, lists and dicts are walked here, several times faster than by torch's pytree,
    which walks all other registered classes.
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
    if kind in _ATOMS:
        return tree
    return pytree.tree_map_only(Tensor, fn, tree)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in pytree order."""
    if isinstance(tree, Tensor):
        return [tree]
    kind = type(tree)
    if kind is tuple or kind is list:
        found = []
        for child in tree:
            found += [child] if isinstance(child, Tensor) else tensors_of(child)
        return found
    if kind in _ATOMS:
        return []
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def to_device(state: DistState, batch: Any) -> Any:
    """Move the tensors of a batch to the state's device, without a wait where that is safe."""
    device = state.device
    elsewhere = [tensor for tensor in tensors_of(batch) if tensor.device != device]
    if not elsewhere:
        return batch
    overlap = device.type != "cpu"  # a copy to the host that nobody waits for is read too early

    def to(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=overlap)

    return map_tensors(to, batch)


def num_samples(batch: Any) -> int:
    """Count the samples of a batch: the leading dimension that all its tensors share.

    0-dim tensors and non-tensors do not count. This is the default
    `weight_fn` of a plan: every sample weighs the same.

    Args:
        batch: a tree of tensors, each [num_samples, ...].

    Returns:
        The number of samples, >= 0.

    Raises:
        ValueError: no tensor has a leading dimension, or two disagree in it.

    Cost: reads shapes only.

    >>> import torch, accel_fn as af
    >>> af.num_samples({"image": torch.zeros(8, 3, 4, 4), "label": torch.zeros(8)})
    8
    """
    count = -1
    for tensor in tensors_of(batch):
        if tensor.ndim:
            size = tensor.size(0)
            if size != count:
                if count >= 0:
                    _refuse_ragged(batch)
                count = size
    if count < 0:
        raise BatchError(
            "num_samples: batch must hold a tensor with a leading dimension, "
            f"got {type(batch).__name__}; register such a class with torch's pytree, or give Plan "
            "a weight_fn and accumulate a split for such data"
        )
    return count


def _refuse_ragged(batch: Any) -> None:
    shapes = [tuple(tensor.shape) for tensor in tensors_of(batch) if tensor.ndim]
    raise BatchError(
        "num_samples: batch must hold tensors of one leading dimension, "
        f"got shapes {shapes}; give Plan a weight_fn and accumulate a split for such data"
    )


def part_sizes(num_rows: int, num_parts: int) -> list[int]:
    """Return sizes of `num_parts` consecutive parts of `num_rows`, as even as possible, larger ones first."""
    size, extra = divmod(num_rows, num_parts)
    return [size + 1] * extra + [size] * (num_parts - extra)


def part_bounds(num_rows: int, num_parts: int, index: int) -> tuple[int, int]:
    """Return where such a part starts and stops; as rows are added, it never moves back."""
    size, extra = divmod(num_rows, num_parts)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


def split_rows(tree: Any, sizes: list[int]) -> Sequence[Any]:
    """Cut `tree` into consecutive parts of these sizes: tensors, and columns of non-tensors."""
    if isinstance(tree, Tensor):
        return torch.split_with_sizes(tree, sizes) if tree.ndim else [tree] * len(sizes)
    kind = type(tree)
    if (kind is tuple or kind is list) and _is_column(tree, sizes):
        stops = list(accumulate(sizes))
        return [tree[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
    if kind is tuple and tree:
        return list(zip(*[split_rows(child, sizes) for child in tree], strict=True))
    if kind is dict:
        columns = zip(*[split_rows(child, sizes) for child in tree.values()], strict=True)
        return [dict(zip(tree, column, strict=True)) for column in columns] or [tree] * len(sizes)
    if kind in _ATOMS:
        return [tree] * len(sizes)
    children, structure = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    if structure.is_leaf() or not children:
        return [tree] * len(sizes)
    columns = zip(*[split_rows(child, sizes) for child in children], strict=True)
    return [pytree.tree_unflatten(column, structure) for column in columns]


def _is_column(tree: Sequence[Any], sizes: list[int]) -> bool:
    """Does it hold one non-tensor a sample? Of tuples, only those of strings do, as torch collates them."""
    if len(tree) != sum(sizes):
        return False
    kinds = {*map(type, tree)}
    if type(tree) is tuple:
        return kinds <= {str, bytes}
    if kinds == {tuple} and len(sizes) > 1 and all(_is_column(each, sizes) for each in tree):
        raise BatchError(
            f"step: batch must not be ambiguous, got a list of {len(tree)} tuples of as many strings for "
            "as many samples, of which each may be a sample or a field; give accumulate a split"
        )
    return not tensors_of(tree)


def split_batch(batch: Any, num_parts: int) -> Sequence[Any]:
    """Cut a batch into consecutive parts along the leading dimension, as even as possible.

    Parts differ by at most one sample; there are never more parts than
    samples, and always one, so that no part is empty unless the batch is.

    Args:
        batch: a tree of tensors, each [num_samples, ...]. Lists of num_samples
            non-tensors, and tuples of as many strings, are cut with them; all else
            goes to every part whole.
        num_parts: at most this many parts.

    Returns:
        Views of the batch, no copies.

    Raises:
        ValueError: two tensors disagree in their leading dimension.

    Cost: no read of the data.

    >>> import torch
    >>> from accel_fn.base.batch import split_batch
    >>> [len(part) for part in split_batch(torch.zeros(10, 3), 4)]
    [3, 3, 2, 2]
    """
    num_rows = num_samples(batch)
    return split_rows(batch, part_sizes(num_rows, max(1, min(num_parts, num_rows))))


def take_part(batch: Any, index: int, num_parts: int) -> Any:
    """Return part `index` of `num_parts` consecutive parts; it is empty if samples are fewer."""
    return split_rows(batch, part_sizes(num_samples(batch), num_parts))[index]
