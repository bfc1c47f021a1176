"""Messages between ranks without collectives: a background thread may send them at any time."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import finalize

import torch

from accel_fn.core import primitives
from accel_fn.core.signed import signed, verified
from accel_fn.core.state import DistState
from accel_fn.errors import AccelError, PeerError

_TAGS = 1 << 30
# The size in bytes of the first message of a value. The message begins with the length of the value
# in 8 bytes, followed by as many bytes of the value as fit.
_HEAD = 256


@dataclass(frozen=True, slots=True)
class _Failure:
    """The error that peers raise; a rank that failed sends it instead of a value."""

    kind: type[AccelError]
    text: str


class Channel:
    """Messages between all ranks for one exchange, such as a pass over the data.

    `open_channel` makes it. Messages of a channel arrive in the order in which they were sent, from
    any thread. They do not mix with messages of other channels, or with collectives. Only one
    thread of a rank uses a channel at a time.
    """

    def __init__(self, state: DistState, tag: int) -> None:
        self.state = state
        self.tag = tag
        self._num_others = 0
        self._is_over = False

    def another(self) -> Channel:
        """Return another channel; all ranks call this in the same order."""
        self._num_others += 1
        return type(self)(self.state, self.tag + self._num_others)

    def via_main(self, value: Any, answers_of: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Send this rank's picklable `value` to rank 0, and return rank 0's answer to this rank.

        Only rank 0 calls `answers_of`, with all values in rank order; it returns one answer per
        rank. If `answers_of` raises an error, or a rank called `fail`, all ranks raise an error.

        Cost: two messages per rank, and one more for each pickled value or answer of over 216
        bytes.
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
            _wait(
                self._send_failure(failure, [rank for rank in self._others() if rank not in failed])
            )
            self._end(failure)
        try:
            answers = answers_of(values)
            blocks = [pickle.dumps(answer) for answer in answers]
        except Exception as error:
            self._is_over = True
            _wait(self._send_failure(self._verdict(error), self._others()))
            raise
        _wait([work for rank in self._others() for work in self._post(blocks[rank], rank)])
        return answers[0]

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's picklable `value`, in rank order, at the cost of `via_main`."""
        return self.via_main(  # type: ignore[no-any-return]
            value, lambda values: [values] * self.state.world_size
        )

    def fail(self, error: Exception) -> None:
        """Send an error to the peers, which raise at their next exchange; return at once.

        It does nothing if the exchange is over already.
        """
        # Do not wait for the rest of the exchange: in a training loop, a peer may be in a step, in
        # which it waits for this rank.
        if not self._is_over:
            self._is_over = True
            self._keep(
                self._send_failure(
                    self._failure(error), self._others() if self.state.is_main else [0]
                )
            )

    def sending_errors(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the items; if they raise, send the error to the peers too."""
        try:
            yield from items
        except Exception as error:
            self.fail(error)
            raise

    def send(self, value: Any, rank: int) -> list[primitives.Work]:
        """Start to send a picklable value; the caller keeps the result and waits for it."""
        return self._post(pickle.dumps(value), rank)

    def receive(self, source: int) -> Any:
        """Return the next value that `source` sends."""
        # The first message holds the length: the receiver must know the size of the second one to
        # read it.
        head = self._read(_HEAD, source)
        size = int.from_bytes(head[:8], "little")
        rest = self._read(8 + size - _HEAD, source) if 8 + size > _HEAD else b""
        return pickle.loads(verified(head[8 : 8 + size] + rest, "shard_loader"))

    def _others(self) -> range:
        """Return all ranks but rank 0."""
        return range(1, self.state.world_size)

    def _end(self, failure: _Failure) -> NoReturn:
        self._is_over = True
        raise failure.kind(failure.text)

    def _failure(self, error: Exception) -> _Failure:
        return _Failure(PeerError, f"shard_loader: failed on rank {self.state.rank}: {error!r}")

    def _verdict(self, error: Exception) -> _Failure:
        """Return the failure that rank 0 sends to all ranks; an AccelError keeps its class and its text."""
        if isinstance(error, AccelError):
            return _Failure(type(error), str(error))
        return self._failure(error)

    def _send_failure(self, failure: _Failure, ranks: Sequence[int]) -> list[primitives.Work]:
        return [work for rank in ranks for work in self.send(failure, rank)]

    def _keep(self, works: list[primitives.Work]) -> None:
        """Keep messages as long as the group exists: a message that is freed too early is lost."""
        if self.state.group is not None:
            finalize(self.state.group, works.clear).atexit = False

    def _post(self, block: bytes, rank: int) -> list[primitives.Work]:
        block = signed(block)
        whole = bytearray(len(block).to_bytes(8, "little") + block).ljust(_HEAD)
        data = torch.frombuffer(whole, dtype=torch.uint8)
        parts = [part for part in (data[:_HEAD], data[_HEAD:]) if len(part)]
        return [primitives.send(part, self.state, rank, self.tag, "loader") for part in parts]

    def _read(self, size: int, source: int) -> bytes:
        data = torch.empty(size, dtype=torch.uint8)
        primitives.receive(data, self.state, source, self.tag, "loader")
        return data.numpy().tobytes()


def open_channel(state: DistState) -> Channel:
    """Open a channel, on all ranks. Cost: one small collective."""
    # Draw the tag from the system: with a generator that a user has seeded, two channels could get
    # one tag.
    tag = random.SystemRandom().randrange(1, _TAGS)
    return Channel(state, primitives.exchange(tag, state, "shard_loader")[0])


def _wait(works: Sequence[primitives.Work]) -> None:
    for work in works:
        work.wait()
