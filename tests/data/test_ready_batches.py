"""Batches that the data set has ready: each is a global batch, of which every rank takes its rows."""

from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

SIZES = (4, 6, 3, 5, 7)
ROWS = TensorDataset(torch.arange(23), torch.arange(23.0).view(23, 1))


class Stored(Dataset):
    """A data set whose items are batches, as files of rows."""

    def __init__(self, sizes=SIZES, noise=False):
        self.items = torch.arange(sum(sizes)).split(sizes)
        self.noise = noise
        self.asked = []

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.asked.append(index)
        numbers = self.items[index]
        names = [f"row {number}" for number in numbers.tolist()]
        noise = torch.rand(len(numbers)) if self.noise else torch.zeros(len(numbers))
        return {"number": numbers, "array": numbers.numpy().copy(), "name": names, "noise": noise}


class Stream(IterableDataset):
    """A stream of the same batches."""

    def __iter__(self):
        return map(Stored().__getitem__, range(len(SIZES)))


class Rows(Dataset):
    """A data set that takes a list of indices, and notes it."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 23

    def __getitem__(self, indices):
        self.asked.append(indices)
        return {"number": torch.as_tensor(indices)}


class Own:
    """A sampler of the user's, with or without a length."""

    def __init__(self, keys):
        self.keys = keys

    def __iter__(self):
        return iter(self.keys)

    def __len__(self):
        return len(self.keys)


class Unsized(Own):
    __len__ = None


LISTS = [[3, 4, 5, 6], [1, 2, 0], [7, 8, 9, 10, 11]]
READY = {
    "items": (Stored, {}),
    "an item a key": (Stored, {"sampler": Own([3, 0, 1])}),
    "a list of keys": (Stored, {"sampler": [2, 1, 4]}),
    "without a length": (Stored, {"sampler": Unsized([3, 0, 1])}),
    "a stream": (Stream, {}),
    "torch's lists": (Rows, {"sampler": BatchSampler(SequentialSampler(range(23)), 5, False)}),
    "torch's lists of own": (Rows, {"sampler": BatchSampler(Own(range(20, 2, -1)), 5, False)}),
    "lists": (Rows, {"sampler": Own(LISTS)}),
    "arrays": (Rows, {"sampler": Own([*map(np.array, LISTS)])}),
    "tensors": (Rows, {"sampler": Unsized([*map(torch.tensor, LISTS)])}),
    "slices of tensors": (lambda: ROWS.tensors[1], {"sampler": Own([slice(0, 4), slice(4, 11)])}),
    "lists, of tensors": (lambda: ROWS, {"sampler": Own(LISTS)}),
}


def listed(batch):
    """Return the rows of a batch as a list."""
    columns = batch.values() if isinstance(batch, dict) else batch
    if isinstance(batch, torch.Tensor):
        return batch.flatten().tolist()
    return [
        list(row)
        for row in zip(
            *(
                each.flatten().tolist() if isinstance(each, torch.Tensor) else each
                for each in columns
            ),
            strict=True,
        )
    ]


def on_ranks(world_size, make, options, *, since=0, around=lambda loader, state: loader, **given):
    """Return the global batches of two epochs, joined over ranks."""

    def run(state):
        loader = DataLoader(make(), batch_size=None, **options)
        loader = around(af.shard_loader(loader, state, **given), state)
        epochs = loader.epochs(2, since=af.DistState(step=since))
        return [listed(batch) for epoch in epochs for batch in epoch]

    ranks = simulate(run, world_size=world_size)
    return [[*chain.from_iterable(parts)] for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize(("make", "options"), READY.values(), ids=READY)
def test_the_parts_of_ready_batches_are_the_batches_of_torchs_loader(make, options):
    whole = 2 * [listed(batch) for batch in DataLoader(make(), batch_size=None, **options)]
    assert on_ranks(2, make, options) == whole


@pytest.mark.parametrize("name", ["items", "without a length", "a stream", "torch's lists"])
def test_a_resumed_run_goes_on_at_its_batch(name):
    whole = on_ranks(2, *READY[name])
    for step in (2, 4, len(whole)):
        assert on_ranks(2, *READY[name], since=step) == whole[step:]


SHUFFLED = {
    "items": (Stored, {"shuffle": True}),
    "drawn items": (Stored, {"sampler": SubsetRandomSampler(range(5))}),
    "lists": (Rows, {"sampler": BatchSampler(RandomSampler(range(23)), 5, False)}),
}


@pytest.mark.parametrize(("make", "options"), SHUFFLED.values(), ids=SHUFFLED)
def test_shuffled_ready_batches_are_the_same_in_every_world(make, options):
    whole = on_ranks(1, make, options)
    assert on_ranks(2, make, options) == on_ranks(3, make, options) == whole
    first, second = whole[:5], whole[5:]
    assert first != second
    assert sorted(chain.from_iterable(first)) == sorted(chain.from_iterable(second))


@pytest.mark.parametrize("name", ["torch's lists", "lists"])
def test_of_a_list_of_indices_each_rank_reads_its_rows_alone(name):
    def run(state):
        make, options = READY[name]
        data = make()
        list(af.shard_loader(DataLoader(data, batch_size=None, **options), state))
        return data.asked

    first, second = simulate(run, world_size=2)
    sizes = {"lists": [(2, 2), (2, 1), (3, 2)], "torch's lists": [(3, 2)] * 4 + [(2, 1)]}[name]
    assert [*zip(map(len, first), map(len, second), strict=True)] == sizes


def test_workers_draw_the_same_noise_for_an_item_on_every_rank():
    options = {"sampler": Own([3, 0, 1]), "num_workers": 1}
    whole = on_ranks(1, lambda: Stored(noise=True), options)
    assert on_ranks(2, lambda: Stored(noise=True), options) == whole
    assert len({row[-1] for batch in whole for row in batch}) == sum(map(len, whole))


@pytest.mark.parametrize("name", ["items", "a stream", "an item a key", "torch's lists"])
def test_batches_of_one_rank_are_refused(name):
    make, options = READY[name]

    def run(state):
        loader = DataLoader(make(), batch_size=None, **options)
        with pytest.raises(
            ValueError,
            match=r"shard_loader: loader must have a batch_size where that is to be one rank's, got "
            r"'batch_size=None'; the batches of a data set.* are shared: use batch=\"global\"",
        ):
            af.shard_loader(loader, state, batch="per_rank")

    simulate(run, world_size=2)


def test_a_stream_of_ready_batches_is_read_by_every_rank():
    with pytest.raises(
        ValueError, match='split must be "round_robin" for a stream of ready batches, which every'
    ):
        af.shard_loader(DataLoader(Stream(), batch_size=None), af.DistState(), split="workers")


@pytest.mark.parametrize("data", [range(5), [{"a": torch.zeros(2), "b": torch.zeros(3)}]])
def test_items_that_are_no_batches_are_refused(data):
    def run(state):
        with pytest.raises(
            ValueError,
            match=r"shard_loader: a ready batch must hold tensors or lists of one length, got .*; "
            r"give the DataLoader a batch_size if the data set gives samples",
        ):
            list(af.shard_loader(DataLoader(data, batch_size=None), state))

    run(af.DistState())
    simulate(run, world_size=2)


@pytest.mark.parametrize("name", ["items", "an item a key"])
def test_rows_of_an_item_have_no_numbers(name):
    make, options = READY[name]
    loader = af.shard_loader(DataLoader(make(), batch_size=None, **options), af.DistState())
    text = "indices: data set must give samples, got 'batches, whose rows have no numbers'"
    for read in (loader.indices, loader.global_indices):
        with pytest.raises(ValueError, match=text):
            read(0, 1)


@pytest.mark.parametrize("name", ["items", "a stream", "an item a key", "lists"])
def test_predict_returns_the_rows_of_ready_batches(name):
    make, options = READY[name]

    def run(state):
        model = torch.nn.Linear(1, 1)
        plan = af.Plan(
            lambda model, batch: model(batch).mean(), model, ours.sgd(model.parameters())
        )
        state, step = af.build(af.wrap_ddp()(plan), state)
        loader = af.shard_loader(DataLoader(make(), batch_size=None, **options), state)
        return af.predict(step, state, loader, lambda model, batch: batch["number"]).tolist()

    given = DataLoader(make(), batch_size=None, **options)
    whole = [number for batch in given for number in batch["number"].tolist()]
    # the numbers of indices in a list are known, and bring the rows into their order
    assert simulate(run, world_size=2) == 2 * [sorted(whole) if "lists" in name else whole]


class Failing(Stored):
    def __getitem__(self, index):
        if index == 2:
            raise OSError("the file is gone")
        return super().__getitem__(index)


def test_an_error_names_the_item():
    loader = DataLoader(Failing(), batch_size=None, num_workers=1)
    with pytest.raises(OSError, match="the file is gone") as caught:
        list(af.shard_loader(loader, af.DistState()))
    noted = [str(caught.value), *caught.value.__notes__]
    assert any("the data set failed to give batch 2" in each for each in noted)
    assert noted[-1] == "shard_loader: batch 2 of epoch 0"
