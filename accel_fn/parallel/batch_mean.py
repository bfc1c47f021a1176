"""batch_mean: the mean over the rows of all ranks, for statistics of the global batch inside a loss."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from accel_fn.core.collectives import agreed
from accel_fn.core.differentiable import eager, inexact, refuse_inexact
from accel_fn.core.state import DistState, check_state, over
from accel_fn.errors import ArgumentTypeError, BatchError, message
from accel_fn.parallel.reduce import reduce_sum


@eager
def batch_mean(x: Tensor, state: DistState, name: str) -> Tensor:
    """Average over the rows of the global batch, those of all ranks, inside a loss.

    For statistics of the batch that a loss reads: the load of experts, a reference point, the loss itself
    of flooding. A gradient goes through it: in the backward it is summed over the ranks, so W ranks train
    as one process. On a mesh it goes over the ranks along `dp`.

    Law: W ranks give the value and the gradient of `x.mean(0)` on one.

    Args:
        x: [num_rows, ...], floating-point; ranks may have different numbers of rows, and none.
        state: of this rank.
        name: of the statistic, the same on every rank, by which ranks notice that they compute another one.

    Returns:
        [...], in the dtype and on the device of `x`, equal on all ranks.

    Raises:
        TypeError: `x` is no floating-point tensor with rows, or `name` no string.
        ValueError: on every rank: names, shapes or dtypes differ, or there is no row; in a loss under
            training beside `accumulate` or `reproducible` (a micro-batch does not know the rows of others),
            also without a graph; use one micro-batch. With a graph under `local_sgd`.

    Cost: a small collective, and that of `reduce_sum` of a tensor of the shape of a row and a number.
    In a world of one, none.

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
    # Its value is of all rows, also without a graph.
    leaves = [x if torch.is_grad_enabled() else x.detach()]
    problem = inexact("batch_mean", leaves, ranks, joins_rows=True)
    agreed(partial(refuse_inexact, "batch_mean", problem), ranks, "batch_mean")
    if ranks.world_size == 1:
        if not len(x):
            raise BatchError("batch_mean: x must have a row on some rank, got none")
        return x.mean(0)
    # In a dict by name: ranks of which one sums another statistic differ in structure, and all raise.
    found = reduce_sum({name: (x.sum(0), len(x))}, state)
    total, num_rows = found[name]
    if not num_rows:
        raise BatchError("batch_mean: x must have a row on some rank, got none")
    return total / num_rows
