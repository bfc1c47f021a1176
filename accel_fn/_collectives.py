"""What ranks say to each other: reduce, broadcast, barrier, on_main."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accel_fn import _comm
from accel_fn._errors import (
    ArgumentError,
    BatchError,
    ReplicaError,
    WorldError,
    check_alike,
    message,
)
from accel_fn._state import DistState

T = TypeVar("T")


def reduce_sum(tree: T, state: DistState) -> T:
    """Sum over the ranks, leaf by leaf, on all ranks.

    Integers are summed as integers, exactly.

    Args:
        tree: a tree of tensors of one shape and dtype on all ranks, and of numbers.
        state: of this rank.

    Returns:
        The same tree of sums: new tensors, and Python numbers for numbers.
        In a world of one, `tree` itself.

    Raises:
        ValueError: on every rank alike, before any data moves: structures, shapes or dtypes differ.

    Cost: two small collectives for the check, then one all-reduce a leaf; one
    host synchronisation where the tree holds numbers.

    >>> import accel_fn as af
    >>> af.reduce_sum({"right": 9, "seen": 10}, af.DistState())
    {'right': 9, 'seen': 10}
    """
    if state.world_size == 1:
        return tree
    return cast("T", _reduced(tree, state, "reduce_sum", _kind, Tensor.clone))


def reduce_mean(tree: T, state: DistState, *, weight: float = 1.0) -> T:
    """Weighted mean over the ranks, leaf by leaf, on all ranks.

    A mean of per-rank means is the mean over all items only if every rank's
    mean is weighted by its number of items: give that as `weight`.

    Args:
        tree: a tree of floating-point tensors of one shape and dtype on all
            ranks, and of numbers.
        state: of this rank.
        weight: of this rank's values, finite and >= 0; a rank of weight 0 does not count,
            whatever its values.

    Returns:
        The same tree of means: new tensors, and floats for numbers. In a
        world of one, `tree` itself.

    Raises:
        ValueError: on every rank alike: structures, shapes or dtypes differ,
            a weight is negative or not finite, or all are 0.

    Cost: as `reduce_sum`.

    >>> import accel_fn as af
    >>> af.reduce_mean(0.5, af.DistState(), weight=32)
    0.5
    """
    weights = _comm.exchange(weight, state, "reduce_mean")
    for rank, each in enumerate(weights):
        if not 0 <= each < float("inf"):
            rule = f"be finite and >= 0 on every rank, it is not on rank {rank}"
            raise ArgumentError(message("reduce_mean", "weight", rule, each))
    if not sum(weights) > 0:
        raise ArgumentError(message("reduce_mean", "weight", "be > 0 on some rank", weights))
    if state.world_size == 1:
        return tree
    share = weight / sum(weights)

    def shared(value: Tensor) -> Tensor:
        value = value if value.is_floating_point() else value.double()
        return value * share if share else torch.zeros_like(value)  # 0, also of what is not finite

    return cast("T", _reduced(tree, state, "reduce_mean", _kind_of_mean, shared))


def _reduced(
    tree: Any,
    state: DistState,
    function: str,
    kind: Callable[[Any], str | None],
    prepare: Callable[[Tensor], Tensor],
) -> Any:
    """The sum over ranks of `prepare`d leaves, once ranks have agreed on the `kind` of each."""
    leaves, structure = pytree.tree_flatten(tree)
    kinds = [kind(leaf) for leaf in leaves]
    check_alike(
        _comm.exchange((str(structure), kinds), state, function, leaves),
        f"{function}: tree must have one structure, and one shape and dtype a leaf, on every rank",
        error=BatchError,
    )
    if None in kinds:
        what = (
            "numbers and tensors"
            if function == "reduce_sum"
            else "numbers and floating-point tensors"
        )
        raise BatchError(message(function, "tree", f"hold {what}", leaves[kinds.index(None)]))
    sums = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            total = prepare(leaf.detach().to(state.device))
        else:
            dtype = torch.int64 if isinstance(leaf, int) else torch.float64
            total = prepare(torch.tensor(leaf, dtype=dtype))
        _comm.start_sum(total, state, function).wait()
        sums.append(total if isinstance(leaf, Tensor) else total.item())
    return pytree.tree_unflatten(sums, structure)


def _kind(leaf: Any) -> str | None:
    """On what ranks must agree of a leaf; None for what cannot be summed."""
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {list(leaf.shape)}"
    return type(leaf).__name__ if isinstance(leaf, int | float) else None


def _kind_of_mean(leaf: Any) -> str | None:
    """The same for what has a mean: floating-point tensors, and numbers of any kind."""
    if isinstance(leaf, Tensor):
        return _kind(leaf) if leaf.is_floating_point() else None
    return "number" if isinstance(leaf, int | float) else None


def broadcast(tree: T, state: DistState, *, source: int = 0) -> T:
    """Give every rank what rank `source` has.

    Args:
        tree: a tree of tensors and picklable things; only the source's counts.
        state: of this rank.
        source: the rank that gives.

    Returns:
        The source's tree, its tensors on each rank's device. In a world of
        one, `tree` itself.

    Raises:
        ValueError: `source` is no rank of this world.

    Cost: two small collectives, then one broadcast a tensor.

    >>> import accel_fn as af
    >>> af.broadcast({"run": "blue-7"}, af.DistState())
    {'run': 'blue-7'}
    """
    if not 0 <= source < state.world_size:
        rule = f"be in 0 .. world_size - 1 = {state.world_size - 1}"
        raise ArgumentError(message("broadcast", "source", rule, source))
    if state.world_size == 1:
        return tree
    leaves, structure = pytree.tree_flatten(tree)
    holes = [_Hole.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    sent = pytree.tree_unflatten(holes, structure) if state.rank == source else None
    theirs, structure = pytree.tree_flatten(
        _comm.exchange(sent, state, "broadcast", leaves)[source]
    )
    for place, hole in enumerate(theirs):
        if isinstance(hole, _Hole):
            given = leaves[place].detach() if state.rank == source else None
            theirs[place] = hole.filled(given, state.device)
            _comm.broadcast(theirs[place], state, source, "broadcast")
    return cast("T", pytree.tree_unflatten(theirs, structure))


@dataclass(frozen=True, slots=True)
class _Hole:
    """Where a tensor is in a tree that travels without it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Hole:
        return cls(tensor.dtype, tuple(tensor.shape))

    def filled(self, given: Tensor | None, device: torch.device) -> Tensor:
        """A new tensor that fits: a copy of the one given, else room for one."""
        room = torch.empty(self.shape, dtype=self.dtype, device=device)
        return room if given is None else room.copy_(given)


def barrier(state: DistState) -> None:
    """Wait until every rank is here.

    Cost: two small collectives on the host; none in a world of one.

    >>> import accel_fn as af
    >>> af.barrier(af.DistState())
    """
    if state.world_size > 1:
        _comm.exchange(None, state, "barrier")


def on_main(fn: Callable[[], T], state: DistState) -> T:
    """Run `fn` on the main rank alone and give its result, or its exception, to all.

    For what must happen once (a download, a folder) and what all must know
    of it. No rank is left waiting when it fails.

    Args:
        fn: takes nothing; what it returns or raises is pickled for the others.
        state: of this rank.

    Returns:
        What `fn` returned, on every rank.

    Raises:
        BaseException: what `fn` raised, on every rank; where it cannot be
            pickled, a `RuntimeError` with its traceback instead on the others.

    Cost: two small collectives, and the time of `fn` on all ranks.

    >>> import accel_fn as af
    >>> af.on_main(lambda: 6 * 7, af.DistState())
    42
    """
    if state.world_size == 1:
        return fn()
    sent: tuple[str, Any] = ("", None)
    failure: BaseException | None = None
    if state.is_main:
        try:
            sent = ("result", fn())
        except BaseException as error:
            failure = error
            sent = ("error", error)
        sent = _picklable(sent)
    kind: str
    value: Any
    kind, value = _comm.exchange(sent, state, "on_main")[0]
    if failure is not None:
        raise failure
    if kind == "error":
        raise value
    return cast("T", value)


def _picklable(sent: tuple[str, Any]) -> tuple[str, Any]:
    """`sent` if it survives pickling, else an error that says what was lost."""
    kind, value = sent
    try:
        pickle.loads(pickle.dumps(value))
        return sent
    except Exception as reason:
        what = "".join(traceback.format_exception(value)) if kind == "error" else repr(value)
        error = WorldError(
            f"on_main: fn must return or raise what can be pickled ({reason}), got {what}"
        )
        return "error", error


def all_or_none(fn: Callable[[], T], state: DistState, function: str) -> T:
    """Run `fn` on every rank; where it raises on one, raise on all."""
    result, failure = None, None
    try:
        result = fn()
    except Exception as error:
        failure = error
    verdicts = _comm.exchange(None if failure is None else repr(failure), state, function)
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # an error that this frame holds would keep the frame, and it the error
    for rank, verdict in enumerate(verdicts):
        if verdict is not None:
            raise ReplicaError(f"{function}: failed on rank {rank}: {verdict}")
    return result  # type: ignore[return-value]
