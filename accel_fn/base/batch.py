"""Batches as trees of tensors: walk, map, place and count them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from accel_fn.base.mappings import opened
from accel_fn.base.state import DistState
from accel_fn.errors import BatchError

ATOMS = (str, bytes, int, float, bool, type(None))


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply `fn` to every tensor of `tree`; keep all else.

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
    if isinstance(tree, Tensor):
        return [tree]
    kind = type(tree)
    if kind is tuple or kind is list:
        found = []
        for child in tree:
            found += [child] if isinstance(child, Tensor) else tensors_of(child)
        return found
    if kind in ATOMS:
        return []
    return [leaf for leaf in pytree.tree_leaves(opened(tree)) if isinstance(leaf, Tensor)]


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
