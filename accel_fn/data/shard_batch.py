"""shard_batch: this rank's rows of a global batch, for data that no DataLoader reads."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from torch.utils import _pytree as pytree

from accel_fn.core.batch import Samples, opened, shapes_of, tensors_of
from accel_fn.core.split_batch import part_bounds, part_sizes, split_rows
from accel_fn.core.state import DistState, check_state
from accel_fn.errors import BatchError, message

T = TypeVar("T")


def shard_batch(tree: T, state: DistState) -> T:
    """Take this rank's rows of a global batch that every rank holds.

    Rows are cut along dimension 0, over `state.data`, as `shard_loader` cuts a batch: consecutive
    parts in rank order, even to one row. Ranks beyond the number of rows get none, which the step
    accepts. So make the batch the same on every rank (from one seed, or by `broadcast`), and each
    rank trains on its part.

    Law: the parts of the ranks, joined, are the batch; a step over the parts is a step over the batch.
    Tests: `tests/laws/law03_parts.py`.

    Args:
        tree: tensors [num_rows, ...] and `samples`, in tuples, lists, dicts, any `Mapping`, and
            classes that torch's pytree knows. Lists of num_rows non-tensors, tuples of as many
            strings and arrays of NumPy are cut too; 0-dim tensors, numbers and strings go to every
            rank whole. A plain list of tensors is structure: mark a list of samples by `samples`.
            Where no tensor has rows, the items of each list are its rows: prompts, file names. Dataclasses
            are taken by their fields. `tree` may also be a `datasets.Dataset`, whose rows are taken
            by `select`.
        state: this rank's state.

    Returns:
        The same tree: views of its tensors, no copies. In a world of one, `tree` itself. None is a
        batch without rows, and so are its parts.

    Raises:
        ValueError: nothing has rows, two tensors or lists have different numbers of them, or it is
            unclear whether something holds rows, such as a list of as many numbers as a tensor has
            rows.

    Cost: no read of the data, and no message.

    >>> import torch, accel_fn as af
    >>> tokens = torch.arange(10).view(5, 2)
    >>> af.shard_batch({"tokens": tokens}, af.DistState(rank=1, world_size=2))
    {'tokens': tensor([[6, 7],
            [8, 9]])}
    >>> af.shard_batch({"prompts": ["a", "b", "c"], "tokens": 20}, af.DistState(rank=0, world_size=2))
    {'prompts': ['a', 'b'], 'tokens': 20}
    """
    check_state("shard_batch", state)
    if _is_table(tree):
        table: Any = tree
        bounds = part_bounds(len(table), state.data.world_size, state.data.rank)
        return cast("T", table if state.data.world_size == 1 else table.select(range(*bounds)))
    return rows_of_rank(tree, state.data.rank, state.data.world_size, "shard_batch")


def rows_of_rank(
    tree: T, rank: int, world_size: int, function: str, name: str = "tree", repair: str = ""
) -> T:
    """Take a rank's rows; error messages name `function`, and call the tree `name`."""
    if tree is None:
        return tree
    rows = tree if shapes_of(tree) else _marked(tree)
    shapes = shapes_of(rows)
    counts = {shape[0] for shape in shapes}
    if len(counts) != 1:
        rule, got = "hold tensors or lists of one length", shapes or type(tree).__name__
        raise BatchError(message(function, name, rule, got, repair))
    if world_size == 1:
        return tree
    found = split_rows(rows, part_sizes(counts.pop(), world_size), function)[rank]
    return cast("T", found if rows is tree else _unmarked(found))


def _is_table(tree: object) -> bool:
    """Return whether the tree is a `datasets.Dataset`."""
    kind = type(tree)
    return kind.__module__.startswith("datasets.") and hasattr(kind, "select")


def _marked(tree: Any) -> Any:
    """Mark lists without tensors as samples, in a tree whose tensors have no rows."""
    return pytree.tree_map_only(list, Samples, opened(tree), is_leaf=_is_list)


def _unmarked(tree: Any) -> Any:
    return pytree.tree_map_only(
        Samples, list, opened(tree), is_leaf=lambda each: isinstance(each, Samples)
    )


def _is_list(node: Any) -> bool:
    return type(node) is list and not tensors_of(node)
