"""Batches of `epochs()` are read from data sets in their epoch; `iter(loader)` sets none."""

import sys
import threading

import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    random_split,
)

import accel_fn as af
from accel_fn.testing.internals import InEpoch

SIZE = 6
WORKERS = [
    {},
    {"num_workers": 1, "persistent_workers": True},
]
ORDERS = [{}, {"shuffle": True}, {"sampler": torch.arange(SIZE).flip(0).tolist()}]


class Curriculum(Dataset):
    """Numbers whose hundreds are the epoch."""

    def __init__(self, size=SIZE):
        self.epoch, self.size, self.calls = 0, size, []

    def set_epoch(self, epoch):
        self.calls.append(epoch)
        self.epoch = epoch

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return 100 * self.epoch + index


def sharded(data, state=None, **options):
    return af.shard_loader(DataLoader(data, batch_size=3, **options), state or af.DistState())


def seen(epoch):
    """The epochs of the samples of a pass."""
    return sorted({int(each) // 100 for batch in epoch for each in torch.as_tensor(batch)})


def halves(data):
    return random_split(data, [0.5, 0.5], torch.Generator().manual_seed(0))[0]


@pytest.mark.parametrize(
    "around",
    [
        lambda data: Subset(data, [4, 1, 3]),
        lambda data: Subset(Subset(data, [4, 1, 3]), [2, 0, 1]),
        lambda data: ConcatDataset([data, Curriculum(), Subset(Curriculum(), [1, 2])]),
        lambda data: ConcatDataset([data, data]),
        halves,
        lambda data: af.data.seed_samples(data, af.DistState()),
        lambda data: StackDataset(data, Curriculum()),
        lambda data: StackDataset(a=data, b=Subset(Curriculum(), range(SIZE))),
    ],
    ids=["subset", "nested", "concat", "twice", "random_split", "seed_samples", "stack", "named"],
)
def test_data_sets_inside_get_the_epoch(around):
    def numbers(batch):
        parts = batch.values() if isinstance(batch, dict) else batch
        return torch.cat([*parts]) if isinstance(batch, dict | list) else batch

    loader = sharded(around(Curriculum()))
    assert [seen(map(numbers, epoch)) for epoch in loader.epochs(3)] == [[0], [1], [2]]


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "prefetch"])
def test_loaders_that_share_a_data_set_are_each_in_their_own_epoch(ahead):
    data = Curriculum(30)
    shared = [ConcatDataset([data, Curriculum()]), data]
    loaders = [sharded(each) for each in shared]
    if ahead:
        loaders = [af.prefetch(loader, af.DistState()) for loader in loaders]
    late, early = [list(each.epochs(3))[epoch] for each, epoch in zip(loaders, (2, 0), strict=True)]
    pairs = [*zip(late, early, strict=False)]
    assert len(pairs) == 10
    assert seen(pair[0] for pair in pairs) == [2]
    assert seen(pair[1] for pair in pairs) == [0]


def test_passes_that_share_data_sets_in_another_order_do_not_wait_for_each_other():
    data = [Curriculum(), Curriculum()]

    def read(readers):
        inside = InEpoch(readers, 0)
        for _ in range(5_000):
            with inside:
                pass

    threads = [
        threading.Thread(target=read, args=(each,), daemon=True) for each in (data, data[::-1])
    ]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(before)
    assert not any(thread.is_alive() for thread in threads)


def test_workers_that_start_while_another_thread_reads_their_data_set_read_too():
    data = Curriculum()
    is_read, is_over = threading.Event(), threading.Event()

    def read():
        with InEpoch([data], 5):
            is_read.set()
            is_over.wait()

    thread = threading.Thread(target=read)
    thread.start()
    is_read.wait()
    options = {"num_workers": 1, "multiprocessing_context": "fork", "timeout": 20}
    try:
        assert [seen(epoch) for epoch in sharded(data, **options).epochs(2)] == [[0], [1]]
    finally:
        is_over.set()
        thread.join()


def test_set_epoch_is_called_once_a_pass():
    data = Curriculum(60)
    for epoch in sharded(data).epochs(3):
        seen(epoch)
    assert data.calls == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "order"), [({}, ORDERS[0]), ({"num_workers": 1}, ORDERS[1]), ({}, ORDERS[2])]
)
def test_iterating_the_loader_keeps_the_epoch_that_the_loop_has_set(options, order):
    data = Curriculum()
    data.set_epoch(7)
    assert seen(sharded(data, **options, **order)) == [7]
    assert seen(af.prefetch(sharded(data, **options, **order), af.DistState())) == [7]
    assert data.calls == [7]


def test_an_epoch_goes_on_as_it_was_after_another_loop_over_its_data_set():
    data = Curriculum(60)
    training, validation = sharded(data), sharded(data)
    epoch = iter([*training.epochs(3)][2])
    assert seen([next(epoch)]) == [2]
    data.set_epoch(5)
    assert seen(validation) == [5]
    assert seen(epoch) == [2]


class Broken(Curriculum):
    def set_epoch(self, epoch):
        if epoch == 1:
            raise OSError("the images of epoch 1 are gone")
        super().set_epoch(epoch)


@pytest.mark.parametrize("options", WORKERS, ids=["no worker", "persistent worker"])
def test_an_error_of_set_epoch_reaches_the_loop_and_other_epochs_go_on(options):
    loader = sharded(ConcatDataset([Curriculum(), Broken()]), **options)
    first, second, third = loader.epochs(3)
    assert seen(first) == [0]
    with pytest.raises(OSError, match="the images of epoch 1 are gone") as caught:
        seen(second)
    assert caught.value.__notes__ == ["shard_loader: batch 0 of epoch 1"]
    assert seen(third) == [2]
    del caught  # it holds the frame of this test, and so the workers
