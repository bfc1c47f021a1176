"""The order of FSDP's collectives in a pass: the same on every rank, or an error on all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from accel_fn.base.state import DistState
from accel_fn.comm import primitives
from accel_fn.errors import LossError, check_alike

_RULE = "step: every rank must use the same FSDP units in the same order"
_REPAIR = (
    "call each unit on every rank, with no rows where it has nothing to do, and let every rank's loss "
    "reach the same parameters"
)
_END = -1

Place = tuple[tuple[int, ...], int, tuple[int, ...]]
"""The kind of pass, how many events were before, and the code of the last of them."""


@dataclass(frozen=True, slots=True)
class Event:
    """A collective of a unit, or the end of a pass."""

    code: tuple[int, ...]
    """The same numbers on all ranks, if they are about to do the same."""
    text: str = field(compare=False)
    stand_in: Callable[[], object] | None = field(compare=False)
    """Joins the collective for a rank that has no use for it; None: the ranks always compare the event."""


class UnitOrder:
    """Keeps the order of FSDP's collectives in a pass: a step, or a batch without gradients.

    Where an event is the only one that ever came at its place, the ranks expect it and send
    nothing more. At any other place they compare what each is about to do. A rank that is
    about to do anything but the expected joins the expected collectives until the next place where
    ranks compare, which the end of a pass always is. So all raise there, or, if all have left
    the order alike, all go on.
    """

    def __init__(self, state: DistState, names: Sequence[str]) -> None:
        self.state = state
        self._names = names
        """The names of the trained parameters."""
        self._expected: dict[Place, Event | None] = {}
        """The event at each place; None where several events have come."""
        self._place: Place | None = None
        self._thread = 0
        self._num_calls = 0
        self._is_mixed = False
        """Does a loss hold collectives of its own? A rank could not join those for another."""
        self._is_refused = False
        """Have the ranks found that this pass differs? Each raises then, and compares no more of it."""

    @property
    def is_open(self) -> bool:
        """Has a pass begun, and not ended?"""
        return self._place is not None

    def begin(self, *kind: int) -> None:
        """Begin a pass of this kind, the same on every rank."""
        self._place, self._is_refused = (kind, 0, ()), False
        self._thread, self._num_calls = threading.get_ident(), primitives.num_calls()

    def end(self, unreached: Sequence[int]) -> None:
        """End a pass: return once all ranks have, with gradients for all parameters but these."""
        if self.is_open and not self._is_refused:
            names = ", ".join([self._names[each] for each in unreached[:3]])
            more = ", ..." if len(unreached) > 3 else ""
            text = f"the end without gradients of {names}{more}" if names else "the end"
            self.meet(Event((_END, *unreached), text, None))
            self._place = None

    def abandon(self) -> None:
        """Forget a pass that failed. Outside of one, ranks compare every event."""
        self._place = None

    def meet(self, event: Event) -> None:
        """Return when every rank is about to do the same; raise on all if one is not."""
        place = self._place
        if place is None:
            self._compare(event, ())
            return
        if self._thread == threading.get_ident() and primitives.num_calls() != self._num_calls:
            self._is_mixed = True
        if self._is_mixed or event.stand_in is None or self._expected.get(place) != event:
            self._join_others(place)
            self._compare(event, place)
            if self._expected.setdefault(place, event) != event:
                self._expected[place] = None
            self._num_calls = primitives.num_calls()
        self._place = _next(place, event)

    def _join_others(self, place: Place) -> None:
        """Stand in for this rank in what the others do, up to the next event that ranks compare."""
        while not self._is_mixed:
            event = self._expected.get(place)
            if event is None or event.stand_in is None:
                return
            event.stand_in()
            place = _next(place, event)

    def _compare(self, event: Event, place: Place | tuple[()]) -> None:
        codes = primitives.exchange_number(hash((place, event.code)), self.state, "wrap_fsdp")
        if min(codes) != max(codes):
            self._is_refused = True
            number = f" as number {place[1] + 1}" if place else ""
            texts = primitives.exchange(event.text + number, self.state, "wrap_fsdp")
            check_alike(texts, _RULE, _REPAIR, LossError)


def _next(place: Place, event: Event) -> Place:
    return place[0], place[1] + 1, event.code
