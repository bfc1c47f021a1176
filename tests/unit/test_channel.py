"""Channels: messages beside collectives, from any thread."""

import threading

import pytest
import torch

from accel_fn._channel import open_channel
from accel_fn.testing import simulate


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_deal_gives_every_rank_its_own(world_size):
    def fn(state):
        channel = open_channel(state)
        values = [f"for {rank}" * rank for rank in range(world_size)]
        return channel.deal(values if state.is_main else None)

    assert simulate(fn, world_size=world_size) == [f"for {r}" * r for r in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_exchange_gives_all_to_all(world_size):
    def fn(state):
        return open_channel(state).exchange((state.rank, torch.arange(state.rank)))

    for every in simulate(fn, world_size=world_size):
        assert [(rank, len(tensor)) for rank, tensor in every] == [
            (r, r) for r in range(world_size)
        ]


def test_channels_and_collectives_of_many_threads_do_not_meet():
    """Every rank starts its threads in another order, while its main thread sums."""

    def fn(state):
        heard = {}

        def talk(name, channel):
            heard[name] = [channel.exchange((name, i, state.rank)) for i in range(20)]

        channels = {name: open_channel(state) for name in "abc"}
        order = list(channels)[:: 1 if state.rank % 2 else -1]
        threads = [threading.Thread(target=talk, args=(name, channels[name])) for name in order]
        for thread in threads:
            thread.start()
        for _ in range(50):
            ones = torch.ones(3)
            state.group.allreduce([ones]).wait()
            assert ones.tolist() == [state.world_size] * 3
        for thread in threads:
            thread.join()
        return heard

    for heard in simulate(fn, world_size=3):
        for name in "abc":
            assert heard[name] == [[(name, i, rank) for rank in range(3)] for i in range(20)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_one_rank_sends_another_receives_in_order(world_size):
    def fn(state):
        channel = open_channel(state)
        following, before = (state.rank + 1) % world_size, (state.rank - 1) % world_size
        sent = [work for i in range(3) for work in channel.send((state.rank, i), following)]
        received = [channel.receive(before) for _ in range(3)]
        for work in sent:
            work.wait()
        return received

    found = simulate(fn, world_size=world_size)
    assert found == [[((r - 1) % world_size, i) for i in range(3)] for r in range(world_size)]
