"""part: this rank's rows of a global batch, for data that come from no DataLoader."""

from __future__ import annotations

from typing import TypeVar, cast

from accel_fn.base.batch import shapes_of
from accel_fn.base.split_batch import part_sizes, split_rows
from accel_fn.base.state import DistState, check_state
from accel_fn.errors import BatchError, message

T = TypeVar("T")


def part(tree: T, state: DistState) -> T:
    """Take this rank's rows of a global batch that every rank holds.

    Rows are cut along dimension 0, over `state.data`, as `shard_loader` cuts a batch: consecutive
    parts in rank order, even to one row. Ranks beyond the number of rows get none, which the step
    takes. So make the batch the same on every rank (from one seed, or by `broadcast`), and each
    trains on its part.

    Law: the parts of the ranks, joined, are the batch; a step over the parts is a step over the batch.

    Args:
        tree: tensors [num_rows, ...] and `samples`, in tuples, lists, dicts, any `Mapping`, and
            classes that torch's pytree knows. Lists of num_rows non-tensors, tuples of as many
            strings and arrays of NumPy are cut too; 0-dim tensors, numbers and strings go to every
            rank whole. A plain list of tensors is structure: mark a list of samples by `samples`.
        state: of this rank.

    Returns:
        The same tree: views of its tensors, no copies. In a world of one, `tree` itself. None is a
        batch without rows, and so are its parts.

    Raises:
        ValueError: no tensor has rows, two have different numbers of them, or something may hold
            rows or not, such as a list of as many numbers as rows.

    Cost: no read of the data, and no message.

    >>> import torch, accel_fn as af
    >>> tokens = torch.arange(10).view(5, 2)
    >>> af.part({"tokens": tokens}, af.DistState(rank=1, world_size=2))
    {'tokens': tensor([[6, 7],
            [8, 9]])}
    """
    check_state("part", state)
    if tree is None:
        return tree
    shapes = shapes_of(tree)
    counts = {shape[0] for shape in shapes}
    if len(counts) != 1:
        rule, got = "hold tensors of one leading dimension", shapes or type(tree).__name__
        raise BatchError(message("part", "tree", rule, got))
    sizes = part_sizes(counts.pop(), state.data.world_size)
    return cast("T", split_rows(tree, sizes, "part")[state.data.rank])
