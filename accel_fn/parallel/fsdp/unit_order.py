"""Make sure that all ranks call FSDP's collectives in one order, or that all ranks raise an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_fn.core import primitives
from accel_fn.core.state import DistState
from accel_fn.errors import LossError, check_equal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_RULE = "step: every rank must use the same FSDP units in the same order"
_REPAIR = (
    "call each unit on every rank, with no rows where it has nothing to do, and let every rank's loss "
    "reach the same parameters"
)
_END = -1

Place = tuple[tuple[int, ...], int, tuple[int, ...]]
"""A place in a pass: the kind of pass, the number of events so far, and the last event's code."""


@dataclass(frozen=True, slots=True)
class Event:
    """A collective of a unit, or the end of a pass."""

    code: tuple[int, ...]
    """A code of the event. If two ranks have the same next collective, their codes are equal."""
    text: str = field(compare=False)
    stand_in: Callable[[], object] | None = field(compare=False)
    """Joins the collective with zeros. None at the end of a pass, where ranks always compare."""


class UnitOrder:
    """Keeps the order of FSDP's collectives in a pass: a step, or a batch without gradients.

    If only one event has ever occurred at a place, the ranks expect it and exchange nothing. At any
    other place they compare their next events.
    """

    # Backends match collectives only by their order. If a rank skips an expert, or fails in an
    # evaluation, its peers would wait in a gather until the time-out. So this rank joins the
    # collectives that its peers expect, up to the next place in the pass where ranks compare their
    # events. There all ranks raise, or all continue.

    def __init__(self, state: DistState, names: Sequence[str]) -> None:
        self.state = state
        self._names = names
        """The names of the trained parameters."""
        self._expected: dict[Place, Event | None] = {}
        """The event at each place; None if several events have occurred there."""
        self._place: Place | None = None
        """The current place in the pass; None between passes, when ranks compare every event."""

    def begin(self, *kind: int) -> None:
        """Begin a pass of this kind, which must be equal on every rank."""
        self._place = kind, 0, ()

    def end(self, unreached: Sequence[int]) -> None:
        """End a pass on all ranks; raise if ranks lack the gradients of different parameters."""
        # If there is no place, a comparison has failed, and all ranks have raised already.
        if self._place is not None:
            names = ", ".join([self._names[each] for each in unreached[:3]])
            more = ", ..." if len(unreached) > 3 else ""
            text = f"the end without gradients of {names}{more}" if names else "the end"
            self.meet(Event((_END, *unreached), text, None))
            self._place = None

    def abandon(self) -> None:
        """Forget a pass that failed."""
        self._place = None

    def meet(self, event: Event) -> None:
        """Compare this event with the next events of the other ranks, unless it is the expected one.

        If the events differ, all ranks raise an error.
        """
        place = self._place
        if place is None:
            self._compare(event, None)
            return
        if event.stand_in is None or self._expected.get(place) != event:
            self._join_peers(place)
            self._compare(event, place)
            # Once two different events have occurred at this place, compare there in every later
            # pass.
            if self._expected.setdefault(place, event) != event:
                self._expected[place] = None
        self._place = _next(place, event)

    def _join_peers(self, place: Place) -> None:
        """Join the collectives of the other ranks, up to the next event that ranks compare."""
        while (event := self._expected.get(place)) and event.stand_in:
            event.stand_in()
            place = _next(place, event)

    def _compare(self, event: Event, place: Place | None) -> None:
        codes = primitives.exchange_number(hash((place, event.code)), self.state, "wrap_fsdp")
        if min(codes) != max(codes):
            # All ranks raise. Clear the place: until the next pass, ranks compare every event.
            self._place = None
            number = f" as number {place[1] + 1}" if place else ""
            texts = primitives.exchange(event.text + number, self.state, "wrap_fsdp")
            check_equal(texts, _RULE, _REPAIR, LossError)


def _next(place: Place, event: Event) -> Place:
    return place[0], place[1] + 1, event.code


class OrderedGather:
    """All-gather of the shards of a unit, with the interface of FSDP's `AllGather`."""

    def __init__(self, order: UnitOrder, unit: int, name: str) -> None:
        self._order, self._unit, self._name = order, unit, name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> primitives.Work | None:
        whole = output_tensor.numel(), output_tensor.dtype, output_tensor.device
        stand_in = partial(_gather_zeros, *whole, group)
        self._order.meet(Event((self._unit, 0), self._name, stand_in))
        return primitives.gather_shards(output_tensor, input_tensor, group, async_op)


class OrderedReduce:
    """Reduce-scatter of the gradients of a unit, with the interface of FSDP's `ReduceScatter`."""

    def __init__(
        self, order: UnitOrder, unit: int, name: str, replicas: ProcessGroup | None, num_shards: int
    ) -> None:
        self._order, self._unit, self._name = order, unit, name
        self._replicas = replicas
        """The group over which FSDP averages the shards afterwards, if there is one."""
        self._num_shards = num_shards
        self._has_input = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # FSDP calls this for the input, then for the output. With one shard, FSDP runs no
        # reduce-scatter, so the ranks compare their order here.
        tensor = torch.empty(*size, dtype=dtype, device=device)
        if self._num_shards == 1:
            if not self._has_input:
                self._meet(tensor, None, None)
            self._has_input = not self._has_input
        return tensor

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> primitives.Work | None:
        self._meet(input_tensor, group, op)
        return primitives.reduce_to_shards(output_tensor, input_tensor, group, op, async_op)

    def _meet(self, tensor: Tensor, group: ProcessGroup | None, op: Any) -> None:
        text = f"the gradient of {self._name} ({tensor.numel()} numbers)"
        whole = tensor.numel(), tensor.dtype, tensor.device
        stand_in = partial(_reduce_zeros, *whole, group, op, self._replicas)
        self._order.meet(Event((self._unit, 1, tensor.numel()), text, stand_in))


def _gather_zeros(size: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> None:
    shard = torch.zeros(size // group.size(), dtype=dtype, device=device)
    primitives.gather_shards(shard.new_empty(size), shard, group, False)


def _reduce_zeros(
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    group: ProcessGroup | None,
    op: Any,
    replicas: ProcessGroup | None,
) -> None:
    shard = whole = torch.zeros(size, dtype=dtype, device=device)
    if group is not None:
        shard = whole.new_empty(size // group.size())
        primitives.reduce_to_shards(shard, whole, group, op, False)
    if replicas is not None:
        primitives.sum_over(shard, replicas)
