"""The public collectives broadcast, barrier and any_rank; an error on one rank raises on all."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accel_fn.core import primitives
from accel_fn.core.batch import TensorPlace, opened
from accel_fn.core.differentiable import (
    detached_in_no_grad,
    eager,
    in_graph,
    inexact,
    refuse_inexact,
    with_gradients,
)
from accel_fn.core.dtensor import leaves_of
from accel_fn.core.primitives import unpickled
from accel_fn.core.state import DistState, check_state
from accel_fn.errors import (
    ArgumentError,
    BatchError,
    PeerError,
    check_count,
    check_equal,
    check_flag,
    message,
)

T = TypeVar("T")
_NO_FLAG = -1


@eager
def broadcast(tree: T, state: DistState, *, source: int = 0) -> T:
    """Send the tree of rank `source` to every rank.

    Gradients flow through the tree's tensors: the backward sums them over the ranks and gives the
    sum to the source. In a loss, every rank must then pass a tensor with a graph.

    Args:
        tree: a tree of tensors and picklable values; the source's tree is sent, the others are
            ignored.
        state: this rank's state.
        source: the rank that sends.

    Returns:
        The source's tree, its tensors on each rank's device. In a world of
        one, `tree` itself.

    Raises:
        ValueError: `source` is not a rank of this world, or differs between ranks; or the source's
            tree holds a leaf that cannot be sent; or, in a loss under training, the tree holds a
            tensor with a graph and the plan uses `accumulate`, `reproducible` or `local_sgd`.
        RuntimeError: another rank got such an argument.

    Cost: two small collectives, then one broadcast per tensor.

    >>> import accel_fn as af
    >>> af.broadcast({"run": "blue-7"}, af.DistState())
    {'run': 'blue-7'}
    """
    check_state("broadcast", state)
    leaves, structure = leaves_of(tree)
    problem = inexact("broadcast", leaves, state)

    def checked() -> tuple[int, bytes]:
        _check_source(source, state)
        refuse_inexact("broadcast", problem)
        return source, _pickled(leaves, structure) if state.rank == source else b""

    if state.world_size == 1:
        _check_source(source, state)
        refuse_inexact("broadcast", problem)
        return cast("T", detached_in_no_grad(tree))
    every = agreed(checked, state, "broadcast", leaves)
    rule = "broadcast: source must be the same on every rank"
    check_equal([each for each, _ in every], rule, error=ArgumentError)
    sent, structure = pytree.tree_flatten(opened(unpickled(every[source][1], state.device)))
    in_graphs = []
    for place, hole in enumerate(sent):
        if isinstance(hole, _Hole):
            given = leaves[place].detach() if state.rank == source else None
            sent[place] = hole.filled(given, state.device)
            primitives.broadcast(sent[place], state, source, "broadcast")
            in_graphs += [place] if hole.in_graph else []
    is_source = state.rank == source
    found = with_gradients(
        [sent[place] for place in in_graphs],
        [leaves[place] for place in in_graphs] if is_source else list(filter(in_graph, leaves)),
        lambda place, total: total.to(leaves[in_graphs[place]].device) if is_source else None,
        state,
        "broadcast",
    )
    for place, tensor in zip(in_graphs, found, strict=True):
        sent[place] = tensor
    return cast("T", pytree.tree_unflatten(sent, structure))


def _check_source(source: int, state: DistState) -> None:
    if check_count("broadcast", "source", source, minimum=0) >= state.world_size:
        rule = f"be in 0 .. world_size - 1 = {state.world_size - 1}"
        raise ArgumentError(message("broadcast", "source", rule, source))


def _pickled(leaves: Sequence[Any], structure: pytree.TreeSpec) -> bytes:
    """Pickle a tree in which a `_Hole` stands for each tensor."""
    holes = [_Hole.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    try:
        data = pickle.dumps(pytree.tree_unflatten(holes, structure))
        pickle.loads(data)
    except Exception as error:
        rule = f"hold tensors and what can be pickled ({error})"
        kinds = [type(leaf).__name__ for leaf in leaves]
        raise BatchError(message("broadcast", "tree", rule, kinds)) from error
    return data


@dataclass(frozen=True, slots=True)
class _Hole(TensorPlace):
    """A placeholder for a tensor: the dtype and shape that the receivers need to allocate it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    in_graph: bool = False
    """Whether gradients flow through the tensor."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @classmethod
    def of(cls, tensor: Tensor) -> _Hole:
        if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
            got = f"{type(tensor).__name__} of layout {tensor.layout}"
            raise BatchError(message("broadcast", "tree", "hold dense tensors", got))
        return cls(tensor.dtype, tuple(tensor.shape), in_graph(tensor))

    def filled(self, given: Tensor | None, device: torch.device) -> Tensor:
        """Return a copy of `given`; for None, return an uninitialized tensor of this dtype and shape."""
        empty = torch.empty(self.shape, dtype=self.dtype, device=device)
        return empty if given is None else empty.copy_(given)


@eager
def barrier(state: DistState) -> None:
    """Wait until every rank has called this.

    Cost: two small collectives on the host; none in a world of one.

    >>> import accel_fn as af
    >>> af.barrier(af.DistState())
    """
    check_state("barrier", state)
    if state.world_size > 1:
        primitives.exchange(None, state, "barrier")


@eager
def any_rank(flag: bool | np.bool_ | Tensor, state: DistState) -> bool:
    """Return whether the flag is set on any rank. Every rank returns the same value.

    Use it when one rank notices something that all ranks must act on: a time limit, a file that
    requests a stop, a loss that is too high.

    Args:
        flag: this rank's flag: True or False, as a Python, NumPy or tensor value.
        state: this rank's state.

    Returns:
        True on all ranks if the flag is set on one of them.

    Raises:
        TypeError: the flag is neither True nor False.
        RuntimeError: the flag of another rank is neither True nor False.

    Cost: one small collective on the host. If the flag is on a device, the host waits for it.

    >>> import accel_fn as af
    >>> af.any_rank(False, af.DistState())
    False
    """
    check_state("any_rank", state)
    value: Any = flag
    if isinstance(flag, Tensor | np.bool_) and math.prod(flag.shape) == 1:
        value = flag.item()
    is_flag = isinstance(value, bool)
    # A rank with an invalid flag sends a third value, `_NO_FLAG`. If the rank raised before the
    # exchange, the other ranks would wait for it.
    every = [value]
    if state.world_size > 1:
        every = primitives.exchange_number(int(value) if is_flag else _NO_FLAG, state, "any_rank")
    check_flag("any_rank", "flag", value)
    if _NO_FLAG in every:
        where = every.index(_NO_FLAG)
        raise PeerError(f"any_rank: failed on rank {where}: its flag is neither True nor False")
    return any(every)


def all_or_none(fn: Callable[[], T], state: DistState, function: str) -> T:
    """Run `fn` on every rank; if it raises on one, raise on all."""
    results: list[T] = []
    agreed(lambda: results.append(fn()), state, function)
    return results[0]


def agreed(
    make: Callable[[], T], state: DistState, function: str, leaves: Sequence[Any] = ()
) -> list[T]:
    """Call `make`, and exchange the results of all ranks; if it raises on one rank, all ranks raise.

    Args:
        make: returns a picklable value, or raises.
        state: this rank's state.
        function: the name of the public function, the same on every rank.
        leaves: tensors whose shapes hang reports show.

    Returns:
        The results, in rank order.

    Raises:
        Exception: raised by `make` on this rank.
        PeerError: `make` raised on another rank only.

    Cost: two small collectives on the host.
    """
    value, failure = None, None
    try:
        value = make()
    except Exception as error:
        failure = error
    verdict = None if failure is None else repr(failure)
    every = primitives.exchange((value, verdict), state, function, leaves)
    if failure is not None:
        try:
            raise failure
        finally:
            # Delete the local reference: otherwise the error and this frame keep each other alive.
            del failure
    for rank, (_, verdict) in enumerate(every):
        if verdict is not None:
            raise PeerError(f"{function}: failed on rank {rank}: {verdict}")
    return [value for value, _ in every]


def send_failure(error: BaseException, state: DistState, function: str) -> None:
    """Send this rank's error to the ranks that wait in `agreed`, where it raises a PeerError.

    Cost: two small collectives on the host.
    """
    primitives.exchange((None, repr(error)), state, function)


def exchange_failures(state: DistState, failure: str) -> list[str]:
    """Return the failures of all ranks, in rank order, with "" for a rank that has not failed.

    Cost: one small collective, and two more if a rank failed.
    """
    if state.world_size == 1:
        return [failure]
    failed = torch.tensor(float(bool(failure)), dtype=torch.float64)
    primitives.start_total(failed, state, "step", what="failures").wait()
    if not failed:
        return [""] * state.world_size
    return primitives.exchange(failure, state, "step")
