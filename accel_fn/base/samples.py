"""samples: a list of which each item is one sample, for items that cannot be stacked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import SupportsIndex, TypeVar, overload

from torch import Tensor
from torch.utils import _pytree as pytree

from accel_fn.errors import ArgumentTypeError, message

T = TypeVar("T")


class Samples(list[T]):
    """A list of which each item is one sample. Made by `samples`.

    Its slices, and what torch's pytree, pinning and pickling make of it, are of this class.
    """

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Samples[T]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> T | Samples[T]:
        if isinstance(index, slice):
            return Samples(super().__getitem__(index))
        return super().__getitem__(index)


pytree.register_pytree_node(
    Samples, lambda items: ([*items], None), lambda items, _: Samples(items)
)


def samples(items: Iterable[T | None]) -> Samples[T]:
    """Mark a list as one item a sample, for a batch of images of several sizes, boxes or graphs.

    A `collate_fn` returns it, alone or anywhere in its batch. Everything then counts, cuts and
    joins its items, whatever their tensors look like: `count_samples`, `accumulate`, `shard_batch`,
    `gather`, `evaluate`. A plain list is structure, as in a batch `[inputs, targets]`.

    Args:
        items: one a sample, of any kind and size. Those that are None are left out, so a data set
            can give None for a sample that it cannot read.

    Returns:
        A list, for models that take one.

    Raises:
        TypeError: `items` is a tensor, a mapping or a string, or cannot be iterated.

    Cost: a list of references.

    >>> import torch, accel_fn as af
    >>> images = af.samples([torch.zeros(3, 4, 5), None, torch.zeros(3, 6, 5)])
    >>> af.count_samples({"images": images, "labels": torch.tensor([1, 0])})
    2
    """
    if not isinstance(items, Iterable) or isinstance(items, Mapping | str | bytes | Tensor):
        rule, repair = "be a list of one item a sample", "the rows of a tensor are samples already"
        got = type(items).__name__
        tensor = isinstance(items, Tensor)
        raise ArgumentTypeError(message("samples", "items", rule, got, repair if tensor else ""))
    return Samples(item for item in items if item is not None)
