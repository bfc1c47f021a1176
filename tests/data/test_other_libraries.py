"""Data sets and loaders of other libraries are split as torch's own."""

import warnings

import datasets
import pytest
import torch
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.testing import simulate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the library uses deprecated names of torch
    from torchdata.stateful_dataloader import StatefulDataLoader

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
SIZE = 11


def table():
    """Make a Hugging Face data set, which reads many rows in one call."""
    rows = {"number": list(range(SIZE)), "text": [f"row {index}" for index in range(SIZE)]}
    return datasets.Dataset.from_dict(rows)


def shards(make, world_size, num_epochs=2):
    """Return the numbers that each rank gets: [rank][epoch][batch]."""

    def run(state):
        loader = af.shard_loader(make(), state)
        return [[number_of(batch) for batch in epoch] for epoch in loader.epochs(num_epochs)]

    return simulate(run, world_size=world_size)


def number_of(batch):
    numbers = batch["number"] if isinstance(batch, dict) else batch
    return numbers.tolist()


def joined(ranks):
    return [
        [[each for part in parts for each in part] for parts in zip(*epochs, strict=True)]
        for epochs in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize(("format_", "num_workers"), [(None, 1), ("torch", 0), ("numpy", 0)])
def test_a_table_of_hugging_face_is_collated_as_torch_would(format_, num_workers):
    given = DataLoader(table().with_format(format_), batch_size=4, num_workers=num_workers)
    for batch, expected in zip(af.shard_loader(given, af.DistState()), given, strict=True):
        assert list(batch) == list(expected) == ["number", "text"]
        torch.testing.assert_close(batch["number"], expected["number"], rtol=0, atol=0)
        assert batch["text"] == expected["text"]


def test_every_row_of_a_table_comes_once():
    [first, second] = joined(shards(lambda: DataLoader(table(), batch_size=4, shuffle=True), 2))
    assert first != second
    for epoch in (first, second):
        assert sorted(each for batch in epoch for each in batch) == list(range(SIZE))


def stateful(**options):
    return StatefulDataLoader(range(SIZE), batch_size=4, **options)


@pytest.mark.parametrize(("shuffle", "num_workers"), [(False, 1), (True, 0)])
def test_torchdatas_loader_reads_what_torchs_does(shuffle, num_workers):
    """Its samplers seed themselves at random on each rank, so the state's seed must decide."""
    theirs = shards(lambda: stateful(shuffle=shuffle, num_workers=num_workers), 2)
    assert theirs == shards(lambda: DataLoader(range(SIZE), batch_size=4, shuffle=shuffle), 2)


def test_torchdatas_loader_has_no_order_of_torch():
    with pytest.raises(ValueError, match='order must be "seed" or "distributed" for a Stateful'):
        af.shard_loader(stateful(shuffle=True), af.DistState(), order="torch")
