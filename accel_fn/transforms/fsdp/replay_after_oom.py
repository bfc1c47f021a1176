"""A rank whose memory has run out goes the rest of the way with the others, who gather parameters with it.

In shards, every forward and backward is a conversation: who leaves it leaves the others
waiting. So a rank that has no room for its samples goes the same way again with very few,
leaves out of it what the others have done with it already, and joins them in the rest.
What comes out of that is of no use, and is thrown away on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from accel_fn.base.batch import num_samples, split_rows
from accel_fn.base.out_of_memory import free_memory, is_memory
from accel_fn.base.state import DistState
from accel_fn.comm import primitives
from accel_fn.errors import OutOfMemoryError
from accel_fn.step.microbatches import Parts

T = TypeVar("T")

_FEW = (2, 1, 0)  # samples of a micro-batch; some statistics need two


class Way:
    """The collectives of a batch in their order, of which some may be behind this rank already."""

    def __init__(self) -> None:
        self._place = 0
        self._num_behind = 0

    def begin(self) -> None:
        """At the start of a batch."""
        self._place = self._num_behind = 0

    def begin_again(self) -> None:
        """At the start of the same, whose first collectives are behind."""
        self._num_behind = max(self._num_behind, self._place)
        self._place = 0

    def join(self, collective: Callable[[], T], instead: Callable[[], object]) -> T | None:
        """The next collective, or what there is in its place where it is behind."""
        result = None
        if self._place < self._num_behind:
            instead()
        else:
            result = collective()
        self._place += 1
        return result

    def counted(self, collective: Callable[..., None]) -> Callable[..., None]:
        """The same as one of them."""
        return lambda *given, **named: self.join(partial(collective, *given, **named), _nothing)


def _nothing() -> None:
    """Instead of what gives nothing."""


class _OnTheWay:
    """A collective of FSDP's: in memory like that of its own, but counted."""

    def __init__(self, way: Way) -> None:
        self._way = way

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gathering(_OnTheWay):
    """Of the ranks' shards. Where it is behind, this rank's stands for each, so that numbers stay sound."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> primitives.Work | None:
        def repeat() -> None:
            output_tensor.view(group.size(), -1).copy_(input_tensor.clone())

        gather = primitives.gather_shards
        return self._way.join(lambda: gather(output_tensor, input_tensor, group, async_op), repeat)


class Reducing(_OnTheWay):
    """Of the ranks' gradients. Where it is behind, they are zeros."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> primitives.Work | None:
        reduce = primitives.reduce_to_shards
        return self._way.join(
            lambda: reduce(output_tensor, input_tensor, group, op, async_op), output_tensor.zero_
        )


def accompany(state: DistState, way: Way, go: Callable[[Parts], None], parts: Parts) -> None:
    """`go` with these micro-batches, to the end of the way, with few samples of each where memory runs out.

    Args:
        state: of this rank.
        way: counts the collectives of `go`.
        go: forward and backward of micro-batches.
        parts: they.

    Raises:
        MemoryError: from the end of the way: memory has run out on it.
        OutOfMemoryError: on it: with few samples, too.
    """
    way.begin()
    failure = _out_of_memory(go, parts)
    if failure and not any(_arrives(state, way, go, parts, size) for size in _FEW):
        raise OutOfMemoryError(
            f"step: model must fit into memory with few samples, got on rank {state.rank}: {failure}; "
            "use smaller blocks, or more ranks"
        )
    if failure:
        raise MemoryError(failure)


def _out_of_memory(go: Callable[[Parts], None], parts: Parts) -> str:
    try:
        go(parts)
    except (RuntimeError, MemoryError) as error:
        if not is_memory(error):
            raise
        return f"out of memory: {error!r}" if not str(error) else str(error)
    return ""


def _arrives(
    state: DistState, way: Way, go: Callable[[Parts], None], parts: Parts, size: int
) -> bool:
    """Does it work with so few samples? They meet parameters that may be none, and any error may follow."""
    way.begin_again()
    free_memory(state)
    try:
        go([_first(part, size) for part in parts])
    except Exception:
        return False
    return True


def _first(part: Any, size: int) -> Any:
    if part is None:
        return None
    num_rows = num_samples(part)
    size = min(size, num_rows)
    return split_rows(part, [size, num_rows - size])[0]
