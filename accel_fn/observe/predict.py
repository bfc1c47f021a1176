"""predict: collect the results of a function of model and batch for every sample of a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accel_fn.checks.first_batches import Looks
from accel_fn.core.batch import map_tensors
from accel_fn.core.collectives import broadcast
from accel_fn.core.loss import given_frozen
from accel_fn.core.plan import Plan
from accel_fn.core.state import DistState, over
from accel_fn.core.step import Step
from accel_fn.errors import ArgumentError, ArgumentTypeError, message
from accel_fn.observe.over_loader import (
    CutBatch,
    check_loader,
    check_step,
    num_rows,
    over_loader,
    over_parts,
    parts_with_rows,
    read_on_all_ranks,
)
from accel_fn.parallel.gather import flat_rows, join_rows

T = TypeVar("T")


def predict(
    step: Step,
    state: DistState,
    loader: Iterable[Any],
    fn: Callable[..., T],
    *,
    progress: bool | None = None,
) -> T:
    """Collect a function's results for every sample of a loader: predictions, scores, embeddings.

    Runs as `evaluate` does: with the step's placement, micro-batches and autocast, without gradients,
    model and optimizers in evaluation mode, all ranks with the buffers of the main rank. Afterwards modes,
    buffers and the global random generators are as they were.

    If the loader knows the numbers of its samples, rows are in that order, even if it
    shuffles, and each sample has one row, even if a sampler repeats it: row i belongs to sample i,
    unless the loader leaves samples out. Rows of a stream, or of any other iterable, come in the
    order in which they are read: by batch, and in a batch by rank.

    Law: the rows of one process, to rounding, for every world size.
    Tests: `tests/laws/law11_predict.py`.

    Args:
        step: the step that `build` returned.
        state: the state, as for the step; it is not changed.
        loader: a loader from `shard_loader`, also through `prefetch` or `group_batches`, or one of
            its epochs; or any iterable of this rank's batches, such as those that `shard_batch` has
            cut. Ranks may have different numbers of batches, or none. A `DataLoader` only in a
            world of one.
        fn: `(model, batch) -> tree`, called on every micro-batch that has rows, which is on the device. The
            tree has tensors [num_rows, ...] and lists of num_rows items, of any kind that can be
            pickled, in tuples, mappings and classes that torch's pytree knows. Structure, dtypes
            and trailing dimensions are the same for every batch; rows of several lengths are items
            of a list. With a parameter named `frozen`, it gets the frozen models of the plan.
        progress: whether the main rank shows a bar. Default: only in a terminal or a notebook.

    Returns:
        The same tree with the rows of the whole loader, on the host, equal on every rank.

    Raises:
        ValueError: on every rank: another number of rows than the batch has samples; a tree that
            differs from batch to batch or from rank to rank; a loader without a row; a `DataLoader` in
            a world of several; a first batch that differs on ranks that differ in other axes than `dp`;
            `local_sgd` between two averages.
        RuntimeError: on the other ranks, when one fails.

    Warns:
        UserWarning: on the main rank: all ranks have the same first batch.

    Cost: per micro-batch, a forward and a copy to the host, which waits for the device; with
    `wrap_fsdp` also one small collective per batch in addition to its own, else no collective. At
    the end, once, four small collectives and one all-gather on the host; two more and a small
    broadcast for each tensor of the tree, if a rank has no rows; and the cost of `evaluate` for
    buffers. Each rank has memory for all rows on its host; while they are joined and sorted, for
    about three times as many.

    >>> import torch, accel_fn as af
    >>> state, step = af.build(af.Plan(loss_fn, model, optimizer), af.DistState())
    >>> data = torch.utils.data.TensorDataset(*batch)
    >>> loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True)
    >>> loader = af.shard_loader(loader, state)
    >>> found = af.predict(step, state, loader, lambda model, batch: {"out": model(batch[0])})
    >>> found["out"].shape
    torch.Size([8, 1])
    """
    check_step("predict", step, state)
    rows = _Rows()

    def read() -> tuple[tuple[int, bool, str], Looks]:
        check_loader("predict", loader, state)
        if not callable(fn):
            rule = "be a function (model, batch) -> tree of rows"
            raise ArgumentTypeError(message("predict", "fn", rule, fn))
        given = given_frozen(fn, step.plan.frozen)

        def use(each: CutBatch) -> None:
            over_parts(step, state, given, each.parts, rows.add)
            rows.end_batch(each.numbers, _window(step.plan, each.batch))

        cut_up = partial(parts_with_rows, step.plan)
        looks = over_loader("predict", step, loader, state, cut_up, use, progress)
        return (rows.count, rows.are_numbered, rows.form), looks

    every = read_on_all_ranks("predict", step, state, read)
    with_rows = [rank for rank, (count, *_) in enumerate(every) if count]
    if not with_rows:
        repair = "an iterator gives its batches only once"
        raise ArgumentError(message("predict", "loader", "give a sample", "none", repair))
    first = with_rows[0]
    for rank in with_rows:
        form, expected = every[rank][2], every[first][2]
        if form != expected:
            got = f"{form} on rank {rank} and {expected} on rank {first}"
            raise ArgumentError(
                f"predict: fn must return one form of tree on every rank, got {got}"
            )
    state = over(state)
    # A rank without rows does not know the form of the tree, so send it an empty tree.
    if len(with_rows) < state.world_size:
        rows.take_form(broadcast([rows.without_rows()], state, source=first)[0])
    tree, numbers, batches = join_rows(rows.joined(), state, "predict", "fn's tree")
    # A stable sort keeps the ranks' rows of one batch in rank order.
    order = torch.argsort(batches, stable=True)
    if all(every[rank][1] for rank in with_rows):
        order = order[torch.argsort(numbers[order], stable=True)]
        in_order = numbers[order]
        is_new = torch.ones(len(order), dtype=torch.bool)
        is_new[1:] = in_order[1:] != in_order[:-1]
        # Keep one row for each sample, even if a sampler repeats it.
        order = order[is_new]
    found: T = tree if torch.equal(order, torch.arange(len(batches))) else _picked(tree, order)
    return found


def _window(plan: Plan, batch: Any) -> list[Any] | None:
    """Return the batches of a window if the plan splits the window into its batches; else None."""
    if not plan.split or type(batch) is not list:
        return None
    parts = [*plan.split[0](batch)]
    return batch if [*map(id, parts)] == [*map(id, batch)] else None


def _picked(tree: Any, order: Tensor) -> Any:
    leaves, structure = flat_rows(tree)
    places = order.tolist()
    picked = [
        leaf[order] if isinstance(leaf, Tensor) else type(leaf)([leaf[place] for place in places])
        for leaf in leaves
    ]
    return pytree.tree_unflatten(picked, structure)


class _Rows:
    """Collects this rank's rows: a piece of each leaf per micro-batch, and each row's sample."""

    def __init__(self) -> None:
        self.structure: pytree.TreeSpec | None = None
        self.form = ""
        """The form of the tree, with dtype and trailing shape instead of each leaf; "" without
        rows."""
        self.pieces: list[list[Any]] = []
        """The pieces of each leaf, in host memory."""
        self.count = 0
        """The number of rows collected so far."""
        none = torch.empty(0, dtype=torch.int64)
        self._numbers, self._batches = [none], [none]
        """For each row, the number of its sample (0 if unknown) and of its batch; a window counts
        as several batches."""
        self.are_numbered = True
        self._num_batches = 0
        self._parts: list[tuple[Any, int]] = []
        """The micro-batches of the current batch, and the number of rows of each."""

    def add(self, part: Any, tree: Any) -> None:
        """Add the tree that `fn` returned for a micro-batch."""
        leaves, structure = flat_rows(tree)
        self._parts.append((part, _common_length(leaves)))
        pieces = [_on_host(leaf) for leaf in leaves]
        form = str(pytree.tree_unflatten([*map(_form, pieces)], structure))
        if self.structure is None:
            self.structure, self.form, self.pieces = structure, form, [[] for _ in pieces]
        if form != self.form or structure != self.structure:
            raise ArgumentError(
                f"predict: fn must return one form of tree for every batch, {self.form} before, got "
                f"{form}; make rows of several lengths a list: list(tensor)"
            )
        for column, piece in zip(self.pieces, pieces, strict=True):
            column.append(piece)

    def end_batch(self, numbers: list[Any] | None, window: list[Any] | None) -> None:
        """Compare the rows of a batch with its samples, and record the sample of each row."""
        inside, count = enumerate(window or ()), 0
        for part, num in self._parts:
            wanted = num_rows(part)
            if numbers is None and wanted is not None:
                _check_count(num, wanted, "in a list, None may stand for a row that is missing")
            place = 0 if window is None else next(place for place, each in inside if each is part)
            self._batches.append(torch.full((num,), self._num_batches + place))
            count += num
        if numbers is not None:
            repair = (
                "where collate_fn leaves samples out or makes several of one, give iter(loader), "
            )
            _check_count(count, len(numbers), f"{repair}whose rows come as they are read")
        if count:
            known = numbers is not None and all(type(each) is int for each in numbers)
            self.are_numbered &= known
            self._numbers.append(torch.tensor(numbers if known else [0] * count))
        self.count += count
        self._num_batches += 1 if window is None else len(window)
        self._parts.clear()

    def without_rows(self) -> Any:
        """Return the tree without rows; None if this rank has no tree."""
        if self.structure is None:
            return None
        return pytree.tree_unflatten([column[0][:0] for column in self.pieces], self.structure)

    def take_form(self, tree: Any) -> None:
        """Take the structure of another rank's tree if this rank has no rows."""
        if self.structure is None:
            leaves, self.structure = flat_rows(tree)
            self.pieces = [[_on_host(leaf)] for leaf in leaves]

    def joined(self) -> tuple[Any, Tensor, Tensor]:
        """Return the tree of all rows of this rank, with the sample and the batch of each row."""
        assert self.structure is not None
        leaves: list[Any] = []
        # Drop each column after it is joined, so that only one column is held twice.
        while self.pieces:
            column = self.pieces.pop(0)
            is_tensor = isinstance(column[0], Tensor)
            leaves.append(torch.cat(column) if is_tensor else _joined(column))
        tree = pytree.tree_unflatten(leaves, self.structure)
        return tree, torch.cat(self._numbers), torch.cat(self._batches)


def _common_length(leaves: Sequence[Any]) -> int:
    """Return the number of rows that all leaves of a tree share."""
    for leaf in leaves:
        if not isinstance(leaf, list) and not (isinstance(leaf, Tensor) and leaf.ndim):
            got = "a 0-dim tensor" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            rule = "return tensors [num_rows, ...] and lists of num_rows items"
            repair = "a figure of the whole loader is what evaluate is for"
            raise ArgumentError(f"predict: fn must {rule}, got {got}; {repair}")
    lengths = [len(leaf) for leaf in leaves]
    if len(set(lengths)) != 1:
        rule = "return tensors and lists of one length"
        raise ArgumentError(f"predict: fn must {rule}, got lengths {lengths}")
    return lengths[0]


def _check_count(num: int, wanted: int, repair: str) -> None:
    if num != wanted:
        rule = f"return one row for each of {wanted} samples"
        raise ArgumentError(f"predict: fn must {rule}, got {num} rows; {repair}")


def _on_host(leaf: Any) -> Any:
    """Copy rows to the host: a view would keep the memory of its whole tensor."""
    if isinstance(leaf, Tensor):
        return leaf.detach().to("cpu", copy=True)
    return type(leaf)(map_tensors(_on_host, item) for item in leaf)


def _form(piece: Any) -> str:
    if isinstance(piece, Tensor):
        return f"{piece.dtype} [{', '.join(['rows', *map(str, piece.shape[1:])])}]"
    return type(piece).__name__


def _joined(column: Sequence[Any]) -> Any:
    joined = type(column[0])()
    for piece in column:
        joined += piece
    return joined
