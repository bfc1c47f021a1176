"""The meeting of ranks in a store: all of them begin the same world, however often each has tried.

A rank that comes leaves a note: a token of this try, and its count of groups. When all notes are
there, rank 0 calls the roll, in a list of calls that all ranks read. A rank that has given up or died
does not answer; a new note in its place is a new roll. When all have answered, rank 0 calls the
begin, and each rank makes its group. The first verdict on the groups holds for all ranks: all of them have
one, or none has.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Never, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from accel_fn.errors import WorldTimeoutError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

_POLL_S, _LINGER_S = 0.01, 1.0
_CALLS, _MADE = "accel_fn/calls", "made"


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a process in the world that it joins, and how long it waits."""

    rank: int
    world_size: int
    timeout_s: float
    deadline: float
    """On the monotonic clock."""
    task: str
    """The words of errors for what all ranks must do."""


def meet(
    store: Store,
    place: Place,
    num_groups: int,
    make: Callable[[Store, int], T],
    leave: Callable[[T], None],
) -> T:
    """Return the group that `make` returns once all ranks have one; else leave it and raise.

    `make` is given a store of this world alone, and the largest `num_groups` of all ranks.
    """
    meeting = _Meeting(store, place, num_groups)
    number, most_groups = meeting.begin()
    own = f"accel_fn/world/{number}"
    group, failure = None, None
    until = time.monotonic() + place.timeout_s + 2 * _LINGER_S
    try:
        try:
            group = make(PrefixStore(own, store), most_groups)
        except Exception as error:
            failure = error
        verdict = _verdict(store, own, place, failure, until)
        if verdict == _MADE and group is not None:
            return group
        if failure is not None and not _is_curable(failure):
            raise failure
        raise WorldTimeoutError(
            f"init: all {place.world_size} ranks must connect to each other within "
            f"{place.timeout_s:g} s, but {verdict}; do all of them run, and can they reach each other?"
        ) from failure
    except BaseException:
        if group is not None:
            leave(group)
        raise


class _Meeting:
    """One try of a rank to come together with the others."""

    def __init__(self, store: Store, place: Place, num_groups: int) -> None:
        self._store, self._place = store, place
        self._note = json.dumps([uuid.uuid4().hex, num_groups])
        self._roll: int | None = None
        """The last roll with this note."""

    def begin(self) -> tuple[int, int]:
        """Wait until all ranks begin; return the number of this call, and the most groups of a rank."""
        first = self._store.add(_CALLS, 0)
        self._store.set(_note(self._place.rank), self._note)
        try:
            number, notes = self._lead(first) if self._place.rank == 0 else self._follow(first)
        except BaseException:
            # The note is gone with the store, which rank 0 may end with its try.
            with suppress(dist.DistNetworkError):
                self._withdraw()
            raise
        self._withdraw()
        return number, max(json.loads(note)[1] for note in notes)

    def _lead(self, number: int) -> tuple[int, list[str]]:
        answers = [_answer_of(number, rank) for rank in range(1, self._place.world_size)]
        try:
            while True:
                notes = self._all_notes()
                self._roll = number = self._call(number, ["roll", notes])
                answers = [_answer_of(number, rank) for rank in range(1, self._place.world_size)]
                while self._all_notes() == notes:
                    if self._store.check(answers):
                        return self._call(number, ["begin", notes]), notes
                    self._pause()
        except WorldTimeoutError as error:
            self._give_up(number, error)
            raise

    def _follow(self, number: int) -> tuple[int, list[str]]:
        while True:
            self._wait([_call(number)])
            kind, notes = json.loads(self._store.get(_call(number)))
            if self._note in notes:
                if kind == "begin":
                    return number, notes
                self._store.set(_answer_of(number, self._place.rank), "")
                if kind != "roll":
                    raise WorldTimeoutError(kind)
                self._roll = number
            number += 1

    def _give_up(self, number: int, error: WorldTimeoutError) -> None:
        """Pass the error on to the ranks that wait, before a store of this process ends with it."""
        notes = {rank: self._note_of(rank) for rank in range(1, self._place.world_size)}
        number = self._call(number, [str(error), [note for note in notes.values() if note]])
        present = [_answer_of(number, rank) for rank, note in notes.items() if note]
        if present:
            with suppress(dist.DistError):
                self._store.wait(present, timedelta(seconds=_LINGER_S))

    def _call(self, number: int, call: list[object]) -> int:
        """Add to the list of calls, at this number or later; return where."""
        text = json.dumps(call)
        while self._store.compare_set(_call(number), "", text) != text.encode():
            number += 1
        self._store.add(_CALLS, 1)
        return number

    def _all_notes(self) -> list[str]:
        """Wait for all ranks; return their notes."""
        keys = [_note(rank) for rank in range(self._place.world_size)]
        while True:
            self._wait(keys)
            notes = [note.decode() for note in self._store.multi_get(keys)]
            if all(notes):
                return notes
            self._pause()

    def _note_of(self, rank: int) -> str:
        key = _note(rank)
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _withdraw(self) -> None:
        self._store.compare_set(_note(self._place.rank), self._note, "")

    def _wait(self, keys: list[str]) -> None:
        left_s = max(self._place.deadline - time.monotonic(), 0.001)
        try:
            self._store.wait(keys, timedelta(seconds=left_s))
        except dist.DistStoreError as error:
            self._raise_late(error)

    def _pause(self) -> None:
        if time.monotonic() > self._place.deadline:
            self._raise_late(None)
        time.sleep(_POLL_S)

    def _raise_late(self, cause: Exception | None) -> Never:
        place = self._place
        problem = f"rank {place.rank} did not see {_named(self._absent())}"
        repair = "is WORLD_SIZE right, and did they start?"
        if self._note_of(place.rank) != self._note:
            problem = f"another process came as rank {place.rank}"
            repair = "is RANK another one on each?"
        raise WorldTimeoutError(
            f"init: all {place.world_size} ranks must {place.task} within {place.timeout_s:g} s, "
            f"{problem}; {repair}"
        ) from cause

    def _absent(self) -> list[int]:
        """The ranks that have not come, or did not answer the last roll; rank 0 if it calls none."""
        ranks = range(self._place.world_size)
        roll = self._roll
        if roll is None:
            absent = [rank for rank in ranks if not self._note_of(rank)]
        else:
            absent = [rank for rank in ranks[1:] if not self._store.check([_answer_of(roll, rank)])]
        return absent or [0]


def _verdict(store: Store, own: str, place: Place, failure: Exception | None, until: float) -> str:
    """Return the first verdict on the groups of all ranks: `_MADE`, or what keeps them apart."""
    verdict = f"{own}/verdict"
    tried = [f"{own}/tried/{rank}" for rank in range(place.world_size)]
    try:
        if failure is None and store.add(f"{own}/made", 1) == place.world_size:
            store.compare_set(verdict, "", _MADE)
        store.set(tried[place.rank], "")
        if failure is not None:
            store.compare_set(verdict, "", _problem(store, tried, place, failure))
        store.wait([verdict], timedelta(seconds=max(until - time.monotonic(), _LINGER_S)))
    except dist.DistStoreError:
        store.compare_set(verdict, "", _silent(store, tried))
    found = store.get(verdict).decode()
    if found != _MADE:
        _linger(store, own, place)
    return found


def _problem(store: Store, tried: list[str], place: Place, failure: Exception) -> str:
    reason = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
    silent = ""
    if _is_curable(failure):
        # Ranks that live fail at about the same time.
        with suppress(dist.DistStoreError):
            store.wait(tried, timedelta(seconds=_LINGER_S))
        silent = _silent(store, tried)
    if silent:
        return f"{silent} ({reason} on rank {place.rank})"
    return f"rank {place.rank} could not ({reason})"


def _silent(store: Store, tried: list[str]) -> str:
    absent = [rank for rank, key in enumerate(tried) if not store.check([key])]
    return f"{_named(absent)} did not answer" if absent else ""


def _linger(store: Store, own: str, place: Place) -> None:
    """Wait on rank 0, whose store may end with its try, until the others have read the verdict."""
    store.set(f"{own}/read/{place.rank}", "")
    if place.rank == 0:
        with suppress(dist.DistStoreError):
            all_read = [f"{own}/read/{rank}" for rank in range(place.world_size)]
            store.wait(all_read, timedelta(seconds=_LINGER_S))


def _is_curable(failure: Exception) -> bool:
    """Has it failed because another rank is gone, or slow? Gloo raises a bare RuntimeError."""
    text = str(failure)
    return (
        isinstance(failure, dist.DistError) or "connectFullMesh" in text or "Wait timeout" in text
    )


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _note(rank: int) -> str:
    return f"accel_fn/note/{rank}"


def _call(number: int) -> str:
    return f"accel_fn/call/{number}"


def _answer_of(number: int, rank: int) -> str:
    return f"accel_fn/answer/{number}/{rank}"
