"""Channels send messages from any thread, apart from collectives."""

import threading

import pytest
import torch

from accel_fn.errors import AccelError, ArgumentError, PeerError
from accel_fn.testing import simulate
from accel_fn.testing.internals import open_channel


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_where_ranks_meet_rank_0_answers_every_one(world_size):
    def fn(state):
        channel = open_channel(state)
        values = [f"for {rank}" * rank for rank in range(world_size)]
        return channel.via_main(state.rank, lambda ranks: [values[rank] for rank in ranks])

    assert simulate(fn, world_size=world_size) == [f"for {r}" * r for r in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_exchange_gives_all_to_all(world_size):
    def fn(state):
        return open_channel(state).exchange((state.rank, torch.arange(state.rank)))

    for every in simulate(fn, world_size=world_size):
        assert [(rank, len(tensor)) for rank, tensor in every] == [
            (r, r) for r in range(world_size)
        ]


def test_values_of_all_sizes_arrive():
    """Pickled, the values need one message or two, and some are just at the limit."""
    values = [bytes(range(256)) * 4, *(b"x" * size for size in range(200, 260)), b""]

    def fn(state):
        channel = open_channel(state)
        for number, value in enumerate(values):
            assert channel.exchange((number + state.rank, value)) == [
                (number, value),
                (number + 1, value),
            ]

    simulate(fn, world_size=2)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("fails", [0, 1])
def test_a_rank_that_fails_does_not_wait_and_its_error_reaches_all(world_size, fails):
    ended = threading.Event()

    def fn(state):
        first = open_channel(state)
        channel = first.another()
        assert channel.exchange(state.rank) == list(range(world_size))
        if state.rank == fails:
            channel.fail(OSError("gone"))
            ended.set()
            return first.another().exchange("on")
        assert ended.wait(10)
        with pytest.raises(PeerError) as caught:
            channel.exchange(state.rank)
        assert str(caught.value) == f"shard_loader: failed on rank {fails}: OSError('gone')"
        return first.another().exchange("on")

    assert simulate(fn, world_size=world_size) == [["on"] * world_size] * world_size


def test_several_may_fail_at_once():
    def fn(state):
        channel = open_channel(state)
        if state.rank in (1, 2):
            channel.fail(OSError("gone"))
            return ""
        with pytest.raises(PeerError) as caught:
            channel.exchange(state.rank)
        return str(caught.value)

    text = "shard_loader: failed on rank 1: OSError('gone')"
    assert simulate(fn, world_size=4) == [text, "", "", text]


def test_an_answer_that_fails_is_raised_on_all():
    """An error of accel_fn arrives as it is; any other error arrives as a failure of rank 0."""

    def fn(state):
        said = []
        for error in (ArgumentError("shard_loader: no"), KeyError("lost"), None):
            channel = open_channel(state)

            def answers_of(values, error=error):
                if error is not None:
                    raise error
                return [Opaque()] * state.world_size

            with pytest.raises((AccelError, KeyError, TypeError)) as caught:
                channel.via_main(None, answers_of)
            said.append(repr(caught.value))
        return said

    first, second = simulate(fn, world_size=2)
    assert first == [
        "ArgumentError('shard_loader: no')",
        "KeyError('lost')",
        "TypeError('opaque')",
    ]
    assert second == [
        first[0],
        "PeerError(\"shard_loader: failed on rank 0: KeyError('lost')\")",
        "PeerError(\"shard_loader: failed on rank 0: TypeError('opaque')\")",
    ]


class Opaque:
    """An object that cannot be pickled."""

    def __reduce__(self):
        raise TypeError("opaque")


def test_channels_and_collectives_of_many_threads_do_not_meet():
    """Every rank starts its threads in another order, while its main thread calls collectives."""

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
