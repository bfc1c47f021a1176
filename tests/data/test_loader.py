"""shard_loader keeps the options of the user's loader, and refuses loaders that it cannot share."""

import random
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    TensorDataset,
)

import accel_fn as af
from accel_fn.testing import simulate
from tests.support.streams import Counting


class Numbers(torch.utils.data.Dataset):
    """A data set that counts its reads."""

    def __init__(self, size):
        self.size, self.read = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return index


def collate(samples):
    return {"ids": torch.tensor(samples), "names": [str(sample) for sample in samples]}


def ids(loader):
    return [batch.tolist() for batch in loader]


def of(size, batch_size=4, **options):
    return DataLoader(Numbers(size), batch_size=batch_size, **options)


KINDS = {
    "map": lambda size: {"dataset": Numbers(size)},
    "sampler": lambda size: {"dataset": Numbers(size), "sampler": list(range(size))},
    "stream": lambda size: {"dataset": Counting(size)},
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@kinds
@pytest.mark.parametrize(
    ("world_size", "options", "expected"),
    [
        (2, {}, [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]),
        (2, {"drop_last": True}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (3, {}, [[[0, 1], [4, 5], [8]], [[2], [6], [9]], [[3], [7], []]]),
        (5, {}, [[[0], [4], [8]], [[1], [5], [9]], [[2], [6], []], [[3], [7], []], [[], [], []]]),
    ],
    ids=["part", "drop_last", "short tail", "small batches"],
)
def test_each_rank_takes_its_part_of_the_global_batch(kind, world_size, options, expected):
    for rank, part in enumerate(expected):
        given = DataLoader(**kind(10), batch_size=4, **options)
        state = af.DistState(rank=rank, world_size=world_size)
        assert ids(af.shard_loader(given, state)) == part


@pytest.mark.parametrize(
    ("size", "batch_size", "what"), [(12, 2, "batch_size=2"), (2, 4, "a data set of 2 samples")]
)
def test_the_main_rank_warns_once_that_ranks_idle(size, batch_size, what):
    def run(state):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            af.shard_loader(of(size, batch_size), state)
        return [str(each.message) for each in caught]

    text = (
        f"shard_loader: {what} leaves 1 of 3 ranks without samples: they idle in every step; use larger "
        "batches or fewer ranks"
    )
    ranks = [run(af.DistState(rank=rank, world_size=3)) for rank in range(3)]
    assert ranks == [[text], [], []]


@kinds
def test_per_rank_keeps_torchs_meaning_of_batch_size(kind):
    given = DataLoader(**kind(16), batch_size=4)
    loader = af.shard_loader(given, af.DistState(rank=1, world_size=2), batch="per_rank")
    assert ids(loader) == [[4, 5, 6, 7], [12, 13, 14, 15]]


def mark(worker):
    torch.utils.data.get_worker_info().dataset.mark = f"set by worker {worker}"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_pinning_without_an_accelerator_does_not_warn(num_workers, monkeypatch):
    """The same script runs on any machine; torch's warning would be an error here."""
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )
    given = of(6, pin_memory=True, num_workers=num_workers)
    assert ids(af.shard_loader(given, af.DistState())) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_pinned_if_the_loader_pins(num_workers):
    data = TensorDataset(torch.arange(6), torch.zeros(6, 2))
    for pins in (False, True):
        given = DataLoader(data, batch_size=4, num_workers=num_workers, pin_memory=pins)
        for batch in af.shard_loader(given, af.DistState()):
            assert [tensor.is_pinned() for tensor in batch] == [pins, pins]


def test_a_worker_that_is_too_slow_is_not_waited_for():
    def slow(samples):
        time.sleep(0.5)

    given = of(4, num_workers=1, timeout=0.2, collate_fn=slow, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match=r"timed out after 0\.2 seconds") as caught:
        list(af.shard_loader(given, af.DistState()))
    assert caught.value.__notes__ == ["shard_loader: batch 0 of epoch 0"]


class Drawn(torch.utils.data.Dataset):
    """A data set that draws random numbers of every kind."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return random.random(), torch.rand(()).item(), np.random.random()


def test_workers_draw_by_seed_epoch_and_rank_and_nobody_elses_numbers_are_used():
    def drawn(seed, rank, epoch):
        generator = torch.Generator().manual_seed(1)
        given = DataLoader(
            Drawn(),
            batch_size=2,
            num_workers=1,
            generator=generator,
            multiprocessing_context="fork",
        )
        loader = af.shard_loader(given, af.DistState(seed=seed, rank=rank, world_size=2))
        before = generator.get_state(), torch.get_rng_state()
        found = [float(value[0]) for value in next(iter(list(loader.epochs(2))[epoch]))]
        for state, then in zip((generator.get_state(), torch.get_rng_state()), before, strict=True):
            assert torch.equal(state, then)
        return tuple(found)

    different = [drawn(*case) for case in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]]
    assert drawn(0, 0, 0) == different[0]
    assert len(set(different)) == 4


def drawn_in_workers(since, **options):
    options = {"num_workers": 2, "multiprocessing_context": "fork", **options}
    given = DataLoader(Drawn(), batch_size=1, collate_fn=list, **options)
    loader = af.shard_loader(given, af.DistState())
    state = af.DistState(step=since)
    return [tuple(batch[0]) for epoch in loader.epochs(2, since=state) for batch in epoch]


def test_what_is_drawn_in_workers_continues_where_a_run_stopped():
    """The run stops in the middle of an epoch, and other workers continue to read."""
    whole = drawn_in_workers(0)
    assert drawn_in_workers(5, num_workers=1, persistent_workers=True) == whole[5:]
    assert len(set(whole)) == 8


def test_only_the_samples_of_this_rank_are_read_and_none_that_are_skipped():
    loader = of(20, shuffle=True)
    shard = af.shard_loader(loader, af.DistState(rank=0, world_size=2))
    resumed = shard.epochs(2, since=af.DistState(step=8))
    read = [batch.tolist() for epoch in resumed for batch in epoch]
    assert loader.dataset.read == [index for batch in read for index in batch]
    assert len(read) == 2


def test_epochs_know_their_position():
    loader = af.shard_loader(of(10), af.DistState())
    epochs = list(loader.epochs(3, since=af.DistState(step=4)))
    assert [(epoch.index, len(epoch)) for epoch in epochs] == [(1, 2), (2, 3)]
    assert list(loader.epochs(3, since=af.DistState(step=9))) == []


DATA = Numbers(12)


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (lambda: of(0), "data set must have a sample, got 0"),
        (
            lambda: of(3, drop_last=True),
            "drop_last=True must leave a batch, got 3 samples for batch_size=4",
        ),
        (
            lambda: DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0), batch_size=4),
            "not be sharded over ranks already, got 'DistributedSampler'; leave that sampler out",
        ),
        (
            lambda: DataLoader(DATA, batch_size=4, num_workers=1, in_order=False),
            "keep batches in order, by which a run knows its position, got 'in_order=False'",
        ),
        (
            lambda: af.shard_loader(of(12), af.DistState()),
            "be a torch DataLoader, got 'ShardedLoader'",
        ),
        (lambda: [1, 2], "be a torch DataLoader, got 'list'"),
    ],
)
def test_what_cannot_be_shared_is_refused_on_every_rank(loader, text):
    def run(state):
        with pytest.raises(ValueError, match=f"shard_loader: .*{text}"):
            af.shard_loader(loader(), state)

    simulate(run, world_size=2)
    with pytest.raises(ValueError, match=f"shard_loader: .*{text}"):
        af.shard_loader(loader(), af.DistState(rank=1, world_size=2))


def test_unequal_seeds_of_ranks_are_refused_on_every_rank():
    def run(state):
        with pytest.raises(RuntimeError, match=r"loader must be the same on every rank, .*seed=1"):
            af.shard_loader(of(12, shuffle=True), replace(state, seed=state.rank))

    simulate(run, world_size=2)


def test_the_meaning_of_a_batch_must_be_known():
    with pytest.raises(ValueError, match='batch must be "global" or "per_rank", got \'local\''):
        af.shard_loader(of(4), af.DistState(), batch="local")


def test_a_state_beyond_the_end_is_refused_on_every_rank():
    for rank in range(3):
        loader = af.shard_loader(of(12), af.DistState(rank=rank, world_size=3))
        with pytest.raises(
            ValueError,
            match=r"since must be at most at the end of 2 epochs, got 'step 7'; .* raise num_epochs",
        ):
            loader.epochs(2, since=af.DistState(step=7))


def test_a_number_in_place_of_a_state_is_refused():
    loader = af.shard_loader(of(12), af.DistState())
    with pytest.raises(TypeError, match="epochs: since must be a DistState, got 3; the state that"):
        loader.epochs(2, since=3)


@pytest.mark.parametrize("method", ["indices", "global_indices"])
def test_an_epoch_before_the_first_is_refused(method):
    loader = af.shard_loader(of(12), af.DistState())
    with pytest.raises(ValueError, match=f"{method}: epoch must be an integer >= 0, got -1"):
        getattr(loader, method)(-1, 0)


def test_the_loader_that_was_split_is_at_hand():
    loader = of(12)
    sharded = af.shard_loader(loader, af.DistState())
    assert sharded.loader is loader
    assert af.group_batches(sharded, 2).loader is loader
    assert af.prefetch(sharded, af.DistState()).loader is loader
