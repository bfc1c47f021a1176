"""Messages from rank to rank beside all collectives: a background thread may send them at any time."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel_fn import _comm
from accel_fn._state import DistState

_TAGS = 1 << 30


@dataclass(frozen=True, slots=True)
class Channel:
    """A line between all ranks of a world for one purpose, a loader say. Made by `open_channel`.

    Messages of one channel arrive in the order in which they were sent, and
    never meet those of another channel or a collective, whatever thread each
    is sent from. A channel itself is used by one thread of a rank at a time.
    """

    state: DistState
    tag: int

    def deal(self, values: Sequence[Any] | None) -> Any:
        """Give every rank its own of rank 0's picklable `values`, one a rank. Others pass None.

        Cost: two messages to every other rank.
        """
        if not self.state.is_main:
            return self.receive(source=0)
        assert values is not None
        sent = []
        for rank in range(1, self.state.world_size):
            sent += self.send(values[rank], rank)
        for work in sent:
            work.wait()
        return values[0]

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order, on all ranks. Cost: four messages a rank."""
        ranks = range(1, self.state.world_size)
        if self.state.is_main:
            every = [value, *(self.receive(source=rank) for rank in ranks)]
            return self.deal([every] * self.state.world_size)  # type: ignore[no-any-return]
        for work in self.send(value, rank=0):
            work.wait()
        return self.deal(None)  # type: ignore[no-any-return]

    def send(self, value: Any, rank: int) -> list[_comm.Work]:
        """Start to give `rank` a picklable value; keep what this returns, and wait for it in the end."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        return [_comm.send(each, self.state, rank, self.tag, "loader") for each in (size, data)]

    def receive(self, source: int) -> Any:
        """The next value that `source` gives this rank."""
        size = self._read(torch.empty(1, dtype=torch.int64), source)
        data = self._read(torch.empty(int(size), dtype=torch.uint8), source)
        return pickle.loads(data.numpy().tobytes())

    def _read(self, tensor: Tensor, source: int) -> Tensor:
        _comm.receive(tensor, self.state, source, self.tag, "loader")
        return tensor


def open_channel(state: DistState) -> Channel:
    """A new channel, on all ranks alike. Cost: one small collective."""
    tag = random.SystemRandom().randrange(1, _TAGS)  # of no generator that a user has seeded
    return Channel(state, _comm.exchange(tag, state, "shard_loader")[0])
