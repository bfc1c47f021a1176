"""Streams of Hugging Face's `datasets`, without changes."""

import datasets
import pytest
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.testing import simulate
from tests.support.streams import global_batches, items_of, joined


def rows(shards, sizes):
    for shard in shards:
        for index in range(sizes[shard]):
            yield {"x": 1000 * shard + index}


def stream(*sizes):
    """Make a stream with a shard for each size."""
    options = {"shards": list(range(len(sizes)))}
    return datasets.IterableDataset.from_generator(
        rows, gen_kwargs={**options, "sizes": tuple(sizes)}
    )


def passes(data, world_size, num_epochs=1, step=0, **options):
    """Return what every rank gets, epoch by epoch."""

    def run(state):
        loader = af.shard_loader(DataLoader(data, batch_size=6, **options), state)
        epochs = loader.epochs(num_epochs, since=af.DistState(step=step))
        return [[batch["x"].tolist() for batch in epoch] for epoch in epochs]

    return list(zip(*simulate(run, world_size=world_size), strict=True))


def items(data, epoch=0):
    data.set_epoch(epoch)
    found = [row["x"] for row in data]
    data.set_epoch(0)
    return found


def test_one_shard_is_read_in_turns_in_its_order():
    data = stream(20).shuffle(seed=1, buffer_size=8)
    epochs = passes(data, 2, num_epochs=2)
    for epoch, ranks in enumerate(epochs):
        assert joined(ranks) == global_batches(items(data, epoch), 6)


def test_shards_of_a_shuffled_stream_are_split_and_every_row_comes_once():
    data = stream(5, 9, 0, 3, 7).shuffle(seed=1, buffer_size=8)
    orders = passes(data, 2, num_epochs=2)
    for ranks in orders:
        assert items_of(ranks) == sorted(items(data))
        for parts in ranks:  # full parts, then empty ones
            assert sum(len(part) not in (0, 3) for part in parts) <= 1
    assert orders[0] != orders[1]


OWN = {
    "drawn by each": lambda rank: stream(12).shuffle(buffer_size=8),
    "shards drawn by each": lambda rank: stream(3, 3, 3, 3).shuffle(buffer_size=8).map(dict),
    "another seed": lambda rank: stream(3, 3, 3, 3).shuffle(seed=rank, buffer_size=8),
    "a part": lambda rank: stream(3, 3, 3, 3).shard(2, rank),
}


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_streams_that_differ_between_ranks_are_refused(make):
    def run(state):
        with pytest.raises(
            RuntimeError,
            match=r"data set must be the same on every rank, got .*; give every rank the whole",
        ):
            af.shard_loader(DataLoader(make(state.rank), batch_size=4), state)

    simulate(run, world_size=2)


@pytest.mark.parametrize(
    ("sizes", "step"), [((30,), 7), ((9, 0, 12, 9), 7)], ids=["round_robin", "split"]
)
def test_a_position_is_the_same_in_a_later_epoch(sizes, step):
    """The stream is read from its start, since its own `skip` gives another order after epoch 0."""
    data = stream(*sizes).shuffle(seed=1, buffer_size=8)
    whole = passes(data, 2, num_epochs=2)
    rest = passes(data, 2, num_epochs=2, step=step)
    epoch = int(step >= len(whole[0][0]))
    batch = step - epoch * len(whole[0][0])
    assert rest[0] == tuple(parts[batch:] for parts in whole[epoch])
    assert rest[1:] == whole[epoch + 1 :]


def test_rows_that_a_map_style_data_set_streams():
    data = datasets.Dataset.from_dict({"x": list(range(50))}).to_iterable_dataset(num_shards=4)
    ranks = passes(data.with_format("torch"), 3, num_workers=1)[0]
    assert items_of(ranks) == list(range(50))


def test_a_stream_that_is_split_by_node_already_is_refused():
    data = split_dataset_by_node(stream(20), rank=0, world_size=2)
    with pytest.raises(ValueError, match="leave out split_dataset_by_node"):
        af.shard_loader(DataLoader(data, batch_size=6), af.DistState(rank=0, world_size=2))


ROWS = datasets.Dataset.from_dict({"x": list(range(12))})
OWN = {
    "split by node": lambda rank: split_dataset_by_node(ROWS, rank=rank, world_size=2),
    "every second": lambda rank: ROWS.select(range(rank, 12, 2)),
    "shuffled": lambda rank: ROWS.shuffle(seed=rank),
    "first and last alike": lambda rank: ROWS.select([0, 3 + rank, 11]),
}


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_rows_of_a_ranks_own_are_refused(make):
    def run(state):
        with pytest.raises(
            RuntimeError, match="data set must be the same on every rank, got samples of checksum"
        ):
            af.shard_loader(DataLoader(make(state.rank), batch_size=2), state)
        af.shard_loader(DataLoader(make(0), batch_size=2), state)

    simulate(run, world_size=2)
