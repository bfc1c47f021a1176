"""Messages from rank to rank beside all collectives: a background thread may send them at any time."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import finalize

import torch

from accel_fn.base.state import DistState
from accel_fn.comm import primitives
from accel_fn.errors import AccelError, PeerError

_TAGS = 1 << 30
_HEAD = 256  # bytes of a first message: 8 for the length of a value, and its start, or all of it


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a rank says in place of its word once it has failed: what the others raise."""

    kind: type[AccelError]
    words: str


class Channel:
    """A line between all ranks of a world for one conversation, a pass say. Made by `open_channel`.

    Messages of one channel arrive in the order in which they were sent, and
    never meet those of another channel or a collective, whatever thread each
    is sent from. A channel itself is used by one thread of a rank at a time.
    """

    def __init__(self, state: DistState, tag: int) -> None:
        self.state = state
        self.tag = tag
        self._num_others = 0
        self._is_over = False

    def another(self) -> Channel:
        """A channel for a conversation of its own; all ranks ask for theirs in the same order."""
        self._num_others += 1
        return type(self)(self.state, self.tag + self._num_others)

    def meet(self, value: Any, answers_of: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Give rank 0 this rank's picklable `value`, and get this rank's answer.

        Rank 0 alone calls `answers_of`, with all values in rank order, for an answer a
        rank. Where that raises, or a rank has come to `fail`, all ranks raise.

        Cost: two messages a rank, and one more for each value or answer of over 248 bytes pickled.
        """
        if not self.state.is_main:
            sent = self.send(value, rank=0)
            answer = self.receive(source=0)
            if isinstance(answer, _Failure):
                self._keep(sent)
                self._end(answer)
            _wait(sent)
            return answer
        values = [value, *map(self.receive, self._others())]
        failed = {rank: each for rank, each in enumerate(values) if isinstance(each, _Failure)}
        if failed:
            failure = failed[min(failed)]
            _wait(self._tell(failure, [rank for rank in self._others() if rank not in failed]))
            self._end(failure)
        try:
            answers = answers_of(values)
            blocks = [pickle.dumps(answer) for answer in answers]
        except Exception as error:
            self._is_over = True
            _wait(self._tell(self._verdict(error), self._others()))
            raise
        _wait([work for rank in self._others() for work in self._post(blocks[rank], rank)])
        return answers[0]

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order, on all ranks. Cost: that of `meet`."""
        return self.meet(  # type: ignore[no-any-return]
            value, lambda values: [values] * self.state.world_size
        )

    def fail(self, error: Exception) -> None:
        """Leave the conversation: the others raise where they meet next. Waits for nobody.

        Nothing is said where they know already that it is over.
        """
        if not self._is_over:
            self._is_over = True
            self._keep(
                self._tell(self._failure(error), self._others() if self.state.is_main else [0])
            )

    def telling(self, items: Iterator[Any]) -> Iterator[Any]:
        """The same items; an error among them is also told to the other ranks."""
        try:
            yield from items
        except Exception as error:
            self.fail(error)
            raise

    def send(self, value: Any, rank: int) -> list[primitives.Work]:
        """Start to give `rank` a picklable value; keep what this returns, and wait for it in the end."""
        return self._post(pickle.dumps(value), rank)

    def receive(self, source: int) -> Any:
        """The next value that `source` gives this rank."""
        head = self._read(_HEAD, source)
        size = int.from_bytes(head[:8], "little")
        rest = self._read(8 + size - _HEAD, source) if 8 + size > _HEAD else b""
        return pickle.loads(head[8 : 8 + size] + rest)

    def _others(self) -> range:
        """All ranks but rank 0."""
        return range(1, self.state.world_size)

    def _end(self, failure: _Failure) -> NoReturn:
        self._is_over = True
        raise failure.kind(failure.words)

    def _failure(self, error: Exception) -> _Failure:
        words = f"shard_loader: failed on rank {self.state.rank}: {error!r}"
        return _Failure(PeerError, words)

    def _verdict(self, error: Exception) -> _Failure:
        """Of rank 0 for all: a rule of ours is broken on every rank alike."""
        if isinstance(error, AccelError):
            return _Failure(type(error), str(error))
        return self._failure(error)

    def _tell(self, failure: _Failure, ranks: Sequence[int]) -> list[primitives.Work]:
        return [work for rank in ranks for work in self.send(failure, rank)]

    def _keep(self, works: list[primitives.Work]) -> None:
        """For somebody who may come to receive them, or not: a message that is let go of is lost."""
        if self.state.group is not None:
            finalize(
                self.state.group, works.clear
            ).atexit = False  # holds them as long as there is the group

    def _post(self, block: bytes, rank: int) -> list[primitives.Work]:
        whole = bytearray(len(block).to_bytes(8, "little") + block).ljust(_HEAD)
        data = torch.frombuffer(whole, dtype=torch.uint8)
        parts = [part for part in (data[:_HEAD], data[_HEAD:]) if len(part)]
        return [primitives.send(part, self.state, rank, self.tag, "loader") for part in parts]

    def _read(self, size: int, source: int) -> bytes:
        data = torch.empty(size, dtype=torch.uint8)
        primitives.receive(data, self.state, source, self.tag, "loader")
        return data.numpy().tobytes()


def open_channel(state: DistState) -> Channel:
    """A new channel, on all ranks alike. Cost: one small collective."""
    tag = random.SystemRandom().randrange(1, _TAGS)  # of no generator that a user has seeded
    return Channel(state, primitives.exchange(tag, state, "shard_loader")[0])


def _wait(works: Sequence[primitives.Work]) -> None:
    for work in works:
        work.wait()
