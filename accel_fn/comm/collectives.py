"""What ranks say to each other: broadcast, barrier, on_main."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accel_fn.base.state import DistState, check_state
from accel_fn.comm import primitives
from accel_fn.comm.agree import agreed
from accel_fn.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchError,
    WorldError,
    check_alike,
    check_count,
    message,
)

T = TypeVar("T")


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
        ValueError: `source` is no rank of this world, or not the same on every rank; or the source's
            tree holds what cannot be sent, on the source.
        RuntimeError: another rank was given such a thing.

    Cost: two small collectives, then one broadcast a tensor.

    >>> import accel_fn as af
    >>> af.broadcast({"run": "blue-7"}, af.DistState())
    {'run': 'blue-7'}
    """
    check_state("broadcast", state)
    leaves, structure = pytree.tree_flatten(tree)

    def told() -> tuple[int, bytes]:
        _check_source(source, state)
        return source, _sent(leaves, structure) if state.rank == source else b""

    if state.world_size == 1:
        _check_source(source, state)
        return tree
    every = agreed(told, state, "broadcast", leaves)
    rule = "broadcast: source must be the same on every rank"
    check_alike([each for each, _ in every], rule, error=ArgumentError)
    theirs, structure = pytree.tree_flatten(pickle.loads(every[source][1]))
    for place, hole in enumerate(theirs):
        if isinstance(hole, _Hole):
            given = leaves[place].detach() if state.rank == source else None
            theirs[place] = hole.filled(given, state.device)
            primitives.broadcast(theirs[place], state, source, "broadcast")
    return cast("T", pytree.tree_unflatten(theirs, structure))


def _check_source(source: int, state: DistState) -> None:
    if check_count("broadcast", "source", source, minimum=0) >= state.world_size:
        rule = f"be in 0 .. world_size - 1 = {state.world_size - 1}"
        raise ArgumentError(message("broadcast", "source", rule, source))


def _sent(leaves: Sequence[Any], structure: pytree.TreeSpec) -> bytes:
    """The pickle of a tree with holes where its tensors are."""
    holes = [_Hole.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    try:
        data = pickle.dumps(pytree.tree_unflatten(holes, structure))
        pickle.loads(data)
    except Exception as error:
        rule = f"hold tensors and what can be pickled ({error})"
        what = [type(leaf).__name__ for leaf in leaves]
        raise BatchError(message("broadcast", "tree", rule, what)) from error
    return data


@dataclass(frozen=True, slots=True)
class _Hole:
    """Where a tensor is in a tree that travels without it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Hole:
        if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
            what = f"{type(tensor).__name__} of layout {tensor.layout}"
            raise BatchError(message("broadcast", "tree", "hold dense tensors", what))
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
    check_state("barrier", state)
    if state.world_size > 1:
        primitives.exchange(None, state, "barrier")


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
        TypeError: `fn` cannot be called.
        RuntimeError: `fn` cannot be called on another rank.

    Cost: two small collectives, and the time of `fn` on all ranks.

    >>> import accel_fn as af
    >>> af.on_main(lambda: 6 * 7, af.DistState())
    42
    """
    check_state("on_main", state)
    failures: list[BaseException] = []

    def told() -> tuple[str, Any]:
        _check_callable(fn)
        if not state.is_main:
            return "", None
        try:
            return _picklable("result", fn())
        except BaseException as error:
            failures.append(error)
            return _picklable("error", error)

    if state.world_size == 1:
        _check_callable(fn)
        return fn()
    kind, value = agreed(told, state, "on_main")[0]
    if failures:
        raise failures.pop()
    if kind == "error":
        raise value
    return cast("T", value)


def _check_callable(fn: object) -> None:
    if not callable(fn):
        raise ArgumentTypeError(message("on_main", "fn", "be a function", fn))


def _picklable(kind: str, value: Any) -> tuple[str, Any]:
    """Both, if the value survives pickling, else an error that says what was lost."""
    try:
        pickle.loads(pickle.dumps(value))
        return kind, value
    except Exception as reason:
        what = "".join(traceback.format_exception(value)) if kind == "error" else repr(value)
        error = WorldError(
            f"on_main: fn must return or raise what can be pickled ({reason}), got {what}"
        )
        return "error", error


def all_or_none(fn: Callable[[], T], state: DistState, function: str) -> T:
    """Run `fn` on every rank; where it raises on one, raise on all."""
    results: list[T] = []
    agreed(lambda: results.append(fn()), state, function)
    return results[0]
