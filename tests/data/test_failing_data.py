"""If data fail on one rank of a loader whose ranks exchange messages, every rank raises at once."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import accel_fn as af
from accel_fn.testing import simulate

SIZE, BATCH_SIZE = 600, 4
NUM_SHARDS = 4


class Rows(Dataset):
    """A data set of rows of one number; `act` is called with each number that is read."""

    def __init__(self, act):
        self.act = act

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        self.act(index)
        return torch.tensor([float(index)])


class Shards(IterableDataset):
    """The same data as a stream that can be split."""

    num_shards = NUM_SHARDS

    def __init__(self, act, numbers=range(SIZE)):
        self.act, self.numbers = act, numbers

    def shard(self, num_shards, index):
        return Shards(self.act, self.numbers[index::num_shards])

    def __iter__(self):
        for number in self.numbers:
            self.act(number)
            yield torch.tensor([float(number)])


def rotten(rank, fails, number):
    """Fail on one rank, at the first of its samples beyond a number."""
    if rank == fails and number >= 20:
        raise ValueError("rotten")


def in_data(kind, act, **options):
    return kind(act), options


def in_collate_fn(kind, act, **options):
    def collate_fn(rows):
        act(int(rows[0][0]))
        return torch.stack(rows)

    return kind(lambda number: None), {**options, "collate_fn": collate_fn}


def listed_sampler(where, act, **options):
    data, options = where(Rows, act, **options)
    # the source reads beyond the batch that fails: it sends 4096 samples at once
    order = [index % SIZE for index in range(8 * SIZE)]
    return DataLoader(data, batch_size=BATCH_SIZE, sampler=order, **options)


class OneByOne:
    """A sampler of the user's own, which is read batch by batch."""

    def __iter__(self):
        return iter(range(SIZE))

    def __len__(self):
        return SIZE


def own_sampler(where, act, **options):
    data, options = where(Rows, act, **options)
    return DataLoader(data, batch_size=BATCH_SIZE, sampler=OneByOne(), **options)


def split_stream(where, act, **options):
    data, options = where(Shards, act, **options)
    return DataLoader(data, batch_size=BATCH_SIZE, **options)


def sharded(make, act, state, ahead):
    loader = af.shard_loader(make(act), state)
    return af.prefetch(loader, state) if ahead else loader


def make_step(state):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = af.Plan(lambda model, rows: model(rows).mean(), model, optimizer)
    return af.build(af.wrap_ddp()(plan), state)


def error_of(fn, *arguments):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        fn(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("where", "talker", "fails", "ahead"),
    [
        (in_data, listed_sampler, 0, True),
        (in_collate_fn, own_sampler, 1, False),
        (in_collate_fn, split_stream, 0, True),
    ],
)
def test_an_evaluation_raises_on_all_ranks(where, talker, fails, ahead):
    def run(state):
        loader = sharded(partial(talker, where), partial(rotten, state.rank, fails), state, ahead)
        state, step = make_step(state)
        return error_of(af.evaluate, step, state, loader)

    found = simulate(run, world_size=2, timeout_s=100)
    assert found[fails] == "rotten"
    assert found[1 - fails].endswith(f": failed on rank {fails}: ValueError('rotten')")


@pytest.mark.parametrize(
    ("talker", "fails", "ahead"), [(own_sampler, 0, False), (split_stream, 2, True)]
)
def test_a_loop_that_catches_the_error_continues_with_all_ranks(talker, fails, ahead):
    """All ranks continue with the next pass, which has a channel of its own."""

    def run(state):
        make = partial(talker, in_data)
        failing = sharded(make, partial(rotten, state.rank, fails), state, ahead)
        said = [error_of(list, failing), error_of(list, failing)]
        well = sharded(make, partial(rotten, state.rank, None), state, ahead)
        return said, len(list(well))

    found = simulate(run, world_size=3, timeout_s=100)
    for rank, (said, _) in enumerate(found):
        other = f"shard_loader: failed on rank {fails}: ValueError('rotten')"
        assert said == ["rotten" if rank == fails else other] * 2
    assert len({num_batches for _, num_batches in found}) == 1
