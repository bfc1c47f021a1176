"""Reduce the trees of all ranks to one tree: sums, means, extremes, and a batch's mean in a loss."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accel_fn.core import primitives
from accel_fn.core.batch import tensors_of
from accel_fn.core.collectives import agreed
from accel_fn.core.differentiable import (
    detached_in_no_grad,
    eager,
    in_graph,
    inexact,
    refuse_inexact,
    with_gradients,
)
from accel_fn.core.dtensor import leaves_of
from accel_fn.core.primitives import bytes_of
from accel_fn.core.state import DistState, check_state, over
from accel_fn.errors import ArgumentError, ArgumentTypeError, BatchError, check_equal, message

T = TypeVar("T")

_SUMMED_AS = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}
"""The dtype to sum in, for dtypes that backends refuse or treat as another dtype."""
_SAME = "must have one structure, and one shape and dtype a leaf, on every rank"


@eager
def reduce_sum(tree: T, state: DistState, *, axis: str | None = None) -> T:
    """Sum over the ranks, leaf by leaf, on all ranks; on a mesh, over the ranks along `dp`.

    Python integers are summed exactly, however large, and booleans among them count as 0 and 1. A
    tensor is summed in its dtype: integers wrap around as in that dtype, and a bool tensor is true
    if any rank's is. Gradients flow through the sum: the backward sums them over the ranks.

    Args:
        tree: a tree of tensors of one shape and dtype on all ranks, in memory
            in any order, and of numbers.
        state: the state of this rank.
        axis: the axis of the mesh over whose ranks to sum; default: `dp`, since the ranks along
            other axes hold the same batch.

    Returns:
        The same tree of sums: new tensors, each on the device of this rank's leaf, and Python numbers
        for numbers. In a world of one, `tree` itself.

    Raises:
        ValueError: before any data moves: structures, shapes or dtypes differ, on every rank; or
            this rank's tree holds other values. In a loss under training: a tensor with a graph,
            with `accumulate`, `reproducible` or `local_sgd`.
        RuntimeError: another rank's tree holds other values.

    Cost: two small collectives, which check the trees and send numbers, then one all-reduce per
    tensor. For tensors with a graph, one more all-reduce in the backward, and a small collective.

    >>> import accel_fn as af
    >>> af.reduce_sum({"right": 9, "seen": 10}, af.DistState())
    {'right': 9, 'seen': 10}
    """
    return _reduced(tree, state, "reduce_sum", axis)


@eager
def reduce_mean(tree: T, state: DistState, *, weight: float = 1.0, axis: str | None = None) -> T:
    """Average over the ranks, weighted, leaf by leaf, on all ranks; on a mesh, over those along `dp`.

    A mean of per-rank means is the mean over all items only if every rank's mean is weighted by its
    number of items: pass that number as `weight`. Gradients flow through the mean, times the rank's
    share: the backward sums them over the ranks.

    Args:
        tree: a tree of floating-point tensors of one shape and dtype on all
            ranks, in memory in any order, and of numbers.
        state: the state of this rank.
        weight: the weight of this rank's values, finite and >= 0; a rank of weight 0 does not
            count, whatever its values.
        axis: as for `reduce_sum`.

    Returns:
        The same tree of means: new tensors, each on the device of this rank's leaf, and floats for
        numbers. In a world of one, `tree` itself.

    Raises:
        ValueError: on every rank: structures, shapes or dtypes differ, a weight is
            negative or not finite, or their sum is not finite or 0; or this rank's
            tree or weight is of something else. In a loss: as `reduce_sum`.
        RuntimeError: another rank's tree or weight is of something else.

    Cost: as `reduce_sum`.

    >>> import accel_fn as af
    >>> af.reduce_mean(0.5, af.DistState(), weight=32)
    0.5
    """
    return _reduced(tree, state, "reduce_mean", axis, weight)


@eager
def reduce_max(tree: T, state: DistState) -> T:
    """Take the largest value over the ranks, leaf by leaf and element by element, on all ranks.

    NaN on any rank is NaN on all. No gradient flows through it: detach tensors in a loss. On a mesh
    it runs over all ranks; pass `state.along("dp")` to limit it to an axis.

    Args:
        tree: a tree of dense real tensors of one shape and dtype on all ranks, and of numbers.
        state: the state of this rank.

    Returns:
        The same tree of largest values: new tensors, each on the device of this rank's leaf, and Python
        numbers for numbers. In a world of one, `tree` itself.

    Raises:
        ValueError: before any data moves: structures, shapes or dtypes differ, on every rank;
            or this rank's tree holds something else, or a tensor with a graph.
        RuntimeError: another rank's tree holds such a thing.

    Cost: two small collectives, which check the trees and send numbers, then one all-gather per
    tensor, with memory for the tensors of all ranks.

    >>> import accel_fn as af
    >>> af.reduce_max({"seconds": 0.25, "tokens": 512}, af.DistState())
    {'seconds': 0.25, 'tokens': 512}
    """
    return cast("T", _extreme(tree, state, "reduce_max", max, torch.maximum))


@eager
def reduce_min(tree: T, state: DistState) -> T:
    """Take the smallest value over the ranks, as `reduce_max` takes the largest.

    Args:
        tree: as for `reduce_max`.
        state: the state of this rank.

    Returns:
        The same tree of smallest values.

    Raises:
        ValueError: as `reduce_max`.
        RuntimeError: as `reduce_max`.

    Cost: as `reduce_max`.

    >>> import accel_fn as af
    >>> af.reduce_min(3, af.DistState())
    3
    """
    return cast("T", _extreme(tree, state, "reduce_min", min, torch.minimum))


@eager
def batch_mean(x: Tensor, state: DistState, name: str) -> Tensor:
    """Average over the rows of the global batch, those of all ranks, inside a loss.

    Use it for statistics of the batch in a loss: the load of experts, a reference point, the loss
    itself of flooding. Gradients flow through it: the backward sums them over the ranks, so W ranks
    train as one process. On a mesh it runs over the ranks along `dp`.

    Law: W ranks give the value and the gradient of `x.mean(0)` on one.
    Tests: `tests/parallel/test_batch_mean.py`.

    Args:
        x: [num_rows, ...], floating-point; ranks may have different numbers of rows, also none.
        state: the state of this rank.
        name: the name of the statistic, which ranks compare, so that they average the same one.

    Returns:
        [...], in the dtype and on the device of `x`, equal on all ranks.

    Raises:
        TypeError: `x` is not a floating-point tensor with rows, or `name` is not a string.
        ValueError: on every rank: names, shapes or dtypes differ, or there is no row. In a loss
            under training, also without a graph: with `accumulate` or `reproducible`, since a
            micro-batch lacks the rows of the others; use one micro-batch. With a graph under
            `local_sgd`.

    Cost: a small collective, and the cost of `reduce_sum` of a number and a tensor with the shape
    of a row. In a world of one, none.

    >>> import torch, accel_fn as af
    >>> af.batch_mean(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), af.DistState(), "load")
    tensor([0.5000, 0.0000])
    """
    check_state("batch_mean", state)
    if not isinstance(x, Tensor) or not x.ndim or not x.is_floating_point():
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        rule = "be a floating-point tensor [num_rows, ...]"
        raise ArgumentTypeError(message("batch_mean", "x", rule, got))
    if not isinstance(name, str):
        raise ArgumentTypeError(message("batch_mean", "name", "be a string", name))
    ranks = over(state)
    # Check `x` even without a graph: if the loss gets only a part of the rows, the mean itself is
    # wrong.
    leaves = [x if torch.is_grad_enabled() else x.detach()]
    problem = inexact("batch_mean", leaves, ranks, joins_rows=True)
    agreed(partial(refuse_inexact, "batch_mean", problem), ranks, "batch_mean")
    if ranks.world_size == 1:
        if not len(x):
            raise BatchError("batch_mean: x must have a row on some rank, got none")
        return x.mean(0)
    # Use the name as a key: if a rank sums another statistic, the structures differ, and all ranks
    # raise.
    found = reduce_sum({name: (x.sum(0), len(x))}, state)
    total, num_rows = found[name]
    if not num_rows:
        raise BatchError("batch_mean: x must have a row on some rank, got none")
    return total / num_rows


def _extreme(
    tree: Any,
    state: DistState,
    function: str,
    of_numbers: Callable[[Sequence[Any]], Any],
    of_tensors: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """Take the minimum or maximum of each leaf over the ranks, element by element."""
    check_state(function, state)
    leaves, structure = leaves_of(tree)

    def described() -> tuple[tuple[str, list[str]], list[float]]:
        form = str(structure), [_kind_of(leaf, function) for leaf in leaves]
        return form, _numbers_in(leaves)

    if state.world_size == 1:
        described()
        return tree
    forms, values = zip(*agreed(described, state, function, leaves), strict=True)
    check_equal(forms, f"{function}: tree {_SAME}", error=BatchError)
    columns = zip(*values, strict=True)
    found = list[Any]()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            sent = _share_of(leaf.to(state.device), 1)
            parts = primitives.all_gather(bytes_of(sent), state, function)
            ranks = [part.view(sent.dtype).view(sent.shape) for part in parts]
            found.append(reduce(of_tensors, ranks).to(leaf.device, leaf.dtype))
        else:
            column = next(columns)
            found.append(next((each for each in column if each != each), of_numbers(column)))
    return pytree.tree_unflatten(found, structure)


def _reduced(tree: T, state: DistState, function: str, axis: str | None, weight: Any = 1) -> T:
    """Sum each leaf over the ranks; for a mean, first multiply each rank's leaf by the rank's share."""
    check_state(function, state)
    state = over(state, axis)
    if state.world_size == 1:
        _shares([_number(weight)])
        refuse_inexact(function, inexact(function, tensors_of(tree), state))
        return cast("T", detached_in_no_grad(tree))
    leaves, structure = leaves_of(tree)
    problem = inexact(function, leaves, state)

    def described() -> tuple[float, tuple[str, list[str]], list[float], list[bool]]:
        form = str(structure), [_kind_of(leaf, function) for leaf in leaves]
        refuse_inexact(function, problem)
        return _number(weight), form, _numbers_in(leaves), [in_graph(leaf) for leaf in leaves]

    every = agreed(described, state, function, leaves)
    weights, forms, values, graphs = zip(*every, strict=True)
    check_equal(forms, f"{function}: tree {_SAME}", error=BatchError)
    shares = _shares(weights) if function == "reduce_mean" else weights
    columns = zip(*values, strict=True)
    totals = list[Any]()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            total = _share_of(leaf.to(state.device), shares[state.rank])
            primitives.start_sum(total, state, function).wait()
            totals.append(total.to(leaf.device, leaf.dtype))
        else:
            pairs = zip(shares, next(columns), strict=True)
            totals.append(sum(share * value for share, value in pairs if share))
    places = [place for place, ranks in enumerate(zip(*graphs, strict=True)) if any(ranks)]
    found = with_gradients(
        [totals[place] for place in places],
        [leaves[place] for place in places],
        lambda place, gradient: (gradient * shares[state.rank]).to(leaves[places[place]].device),
        state,
        function,
    )
    for place, total in zip(places, found, strict=True):
        totals[place] = total
    return cast("T", pytree.tree_unflatten(totals, structure))


def _share_of(tensor: Tensor, share: float) -> Tensor:
    """Copy a tensor, multiplied by a share, into contiguous memory.

    Backends add up elements in the order of memory, which depends on strides, and strides may
    differ between ranks.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    wide = plain.to(_SUMMED_AS.get(plain.dtype, plain.dtype))
    if not share:
        # Do not multiply by 0: a value that is not finite would become NaN.
        wide = torch.zeros_like(wide)
    elif share != 1:
        wide = wide * share
    order = torch.contiguous_format if wide.layout is torch.strided else None
    return wide.clone(memory_format=order)


def _kind_of(leaf: Any, function: str) -> str:
    """Describe a leaf by its type, dtype and shape; refuse a leaf that cannot be reduced.

    The ranks compare these descriptions.
    """
    is_mean, is_extreme = function == "reduce_mean", function in ("reduce_max", "reduce_min")
    if isinstance(leaf, int | float):
        kind = "float" if isinstance(leaf, float) else "int"
        return "number" if is_mean else kind
    # Refuse wrappers of other tensors, which have no memory to reduce.
    fits, rule = isinstance(leaf, Tensor) and not hasattr(leaf, "__tensor_flatten__"), "tensors"
    if is_mean:
        fits, rule = fits and leaf.is_floating_point(), "floating-point tensors"
    elif is_extreme:
        # A sum of uint64 in int64 has the right bits, since both wrap around. A minimum or maximum
        # may be wrong, since int64 orders these bits differently.
        is_real = fits and not leaf.is_complex() and leaf.dtype != torch.uint64
        fits = is_real and leaf.layout is torch.strided
        rule = "dense tensors of real numbers, none of uint64"
    if not fits:
        kind = "real numbers" if is_extreme else "numbers"
        raise BatchError(message(function, "tree", f"hold {kind} and {rule}", leaf))
    if is_extreme and in_graph(leaf):
        got = f"a tensor {list(leaf.shape)} that requires grad"
        repair = "detach it, no gradient goes through a largest or smallest value"
        raise BatchError(f"{function}: tree must hold no tensor with a graph, got {got}; {repair}")
    return f"{leaf.dtype} {list(leaf.shape)} {leaf.layout}".removesuffix(" torch.strided")


def _numbers_in(leaves: Sequence[Any]) -> list[float]:
    return [
        float(leaf) if isinstance(leaf, float) else int(leaf)
        for leaf in leaves
        if not isinstance(leaf, Tensor)
    ]


def _number(weight: Any) -> float:
    value = weight.item() if isinstance(weight, Tensor) and weight.numel() == 1 else weight
    if not isinstance(value, numbers.Real):
        raise ArgumentTypeError(message("reduce_mean", "weight", "be a number", weight))
    return cast("float", value)


def _shares(weights: Sequence[float]) -> list[float]:
    """Return shares of the total weight; raise the same error on every rank for a bad weight."""
    for rank, each in enumerate(weights):
        if not 0 <= each < math.inf:
            rule = f"be finite and >= 0 on every rank, it is not on rank {rank}"
            raise ArgumentError(message("reduce_mean", "weight", rule, each))
    total = sum(weights)
    if not 0 < total < math.inf:
        rule = "be > 0 on some rank" if total == 0 else "have a finite sum over the ranks"
        raise ArgumentError(message("reduce_mean", "weight", rule, list(weights)))
    return [each / total for each in weights]
