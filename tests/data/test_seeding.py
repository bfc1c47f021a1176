"""sample_seed and seed_samples give each sample its own random numbers, and restore the
generators."""

import math
import pickle
import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

import accel_fn as af

HERE = af.DistState(seed=3)
WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}


class Noisy(Dataset):
    """A data set whose samples draw from all three global generators."""

    def __init__(self, size=12):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == 99:
            raise KeyError("no such sample")
        return torch.tensor(
            [float(index), torch.rand(()).item(), random.random(), np.random.random()],
            dtype=torch.float64,
        )


def samples_of(loader):
    """Return the numbers that were drawn, by the number of the sample."""
    return {int(row[0]): row[1:].tolist() for batch in loader for row in batch}


def loader_of(data, state=HERE, **options):
    return af.shard_loader(DataLoader(data, batch_size=4, **options), state)


# -- seeds


def test_a_seed_is_what_every_generator_takes():
    seeds = [af.data.sample_seed(HERE, epoch, index) for epoch in range(30) for index in range(300)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    for seed in (min(seeds), max(seeds)):
        torch.Generator().manual_seed(seed)
        np.random.default_rng(seed)
        random.Random(seed)
        torch.tensor(seed)


def test_a_seed_is_a_function_of_the_runs_seed_epoch_and_index_alone():
    seed = af.data.sample_seed(HERE, 2, 5)
    elsewhere = af.DistState(seed=3, rank=2, world_size=4, step=77, device="meta")
    assert (
        seed
        == af.data.sample_seed(elsewhere, 2, 5)
        == af.data.sample_seed(HERE, np.int64(2), np.int64(5))
    )


@pytest.mark.parametrize("which", ["seed", "epoch", "index"])
def test_seeds_of_neighbours_share_no_more_bits_than_chance(which):
    """Avalanche: of each of the 63 bits, half of 1,000 neighbours flip it, within 5 standard deviations.

    By chance one of 63 bits is further off once in about 30,000 tries; the seeds are fixed.
    """
    at = {"seed": 0, "epoch": 0, "index": 0}

    def seed_at(number):
        place = {**at, which: number}
        return af.data.sample_seed(af.DistState(seed=place["seed"]), place["epoch"], place["index"])

    num_pairs = 1000
    flips = [0] * 63
    for number in range(num_pairs):
        changed = seed_at(number) ^ seed_at(number + 1)
        for bit in range(63):
            flips[bit] += changed >> bit & 1
    bound = 5 * math.sqrt(num_pairs) / 2
    assert max(abs(count - num_pairs / 2) for count in flips) < bound


@pytest.mark.parametrize("value", [-1, 1.5])
@pytest.mark.parametrize("name", ["epoch", "index"])
def test_epoch_and_index_are_counts(name, value):
    with pytest.raises(ValueError, match=f"sample_seed: {name} must be an integer >= 0, got"):
        af.data.sample_seed(HERE, **{"epoch": 0, "index": 0, name: value})


# -- samples


@pytest.mark.parametrize("options", [{}, {**WORKERS, "persistent_workers": True}])
def test_every_epoch_augments_in_its_own_way_and_again_alike(options):
    samples = af.data.seed_samples(Noisy(), HERE)
    loader = loader_of(samples, shuffle=True, **options)
    first, second = [samples_of(epoch) for epoch in loader.epochs(2)]
    loader.set_epoch(0)
    assert samples_of(loader) == first
    by_hand = [{i: samples[e, i][1:].tolist() for i in range(12)} for e in range(2)]
    assert [first, second] == by_hand
    for generator in range(3):
        drawn = [row[generator] for each in (first, second) for row in each.values()]
        assert len(set(drawn)) == 24


@pytest.mark.parametrize(
    "around",
    [
        lambda data: Subset(data, [7, 2, 5]),
        lambda data: Subset(ConcatDataset([Noisy(4), data]), range(4, 16)),
    ],
    ids=["Subset", "both"],
)
def test_a_seeded_data_set_may_be_inside_another(around):
    samples = af.data.seed_samples(Noisy(), HERE)
    for epoch in loader_of(around(samples), shuffle=True).epochs(2):
        for index, drawn in samples_of(epoch).items():
            assert drawn == samples[epoch.index, index][1:].tolist()


def test_a_number_from_the_end_is_the_same_sample():
    samples = af.data.seed_samples(Noisy(), HERE)
    assert samples[1, -3].tolist()[1:] == samples[1, 9].tolist()[1:]
    assert samples[1, torch.tensor(9)].tolist() == samples[1, 9].tolist()


def test_a_seeded_data_set_travels():
    samples = pickle.loads(pickle.dumps(af.data.seed_samples(Noisy(), HERE)))
    assert samples[0, 1].tolist() == af.data.seed_samples(Noisy(), HERE)[0, 1].tolist()


# -- restored generators


def states():
    numpy = np.random.get_state()
    return random.getstate(), torch.get_rng_state().tolist(), numpy[1].tolist(), numpy[2:]


@pytest.mark.parametrize("index", [3, 99])
def test_the_global_generators_are_put_back(index):
    """They are put back after a sample that fails too."""
    before = states()
    samples = af.data.seed_samples(Noisy(100), HERE)
    if index == 99:
        with pytest.raises(KeyError, match="no such sample"):
            samples[0, index]
    else:
        samples[0, index]
    assert states() == before
    if index != 99:
        samples_of(loader_of(Subset(samples, range(50))))
        assert states() == before


def test_samples_may_be_read_by_many_threads():
    """Simulated ranks are such threads: none draws from a generator that another has seeded."""
    samples = af.data.seed_samples(Noisy(), HERE)
    expected = [samples[0, i].tolist() for i in range(12)]
    found = {}

    def read(thread):
        found[thread] = [[samples[0, i].tolist() for i in range(12)] for _ in range(20)]

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [expected] * 20 for number in range(4)}


# -- bad input


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize("data", [Stream(), 3, iter([1])], ids=["stream", "int", "iterator"])
def test_what_has_no_samples_by_number_is_refused(data):
    with pytest.raises(
        TypeError, match=r"seed_samples: data must be a map-style data set, .*with sample_seed"
    ):
        af.data.seed_samples(data, HERE)


def test_a_loader_without_an_epoch_is_refused():
    """With a silent epoch 0, every epoch would be augmented alike."""
    loader = DataLoader(af.data.seed_samples(Noisy(), HERE), batch_size=4)
    with pytest.raises(ValueError, match=r"be read by a loader that shard_loader made, .* got 0; "):
        next(iter(loader))


@pytest.mark.parametrize("epoch", [-1, 0.5, None])
def test_an_epoch_by_hand_is_a_count(epoch):
    with pytest.raises(ValueError, match="seed_samples: epoch must be an integer >= 0, got"):
        af.data.seed_samples(Noisy(), HERE)[epoch, 0]


def test_the_thread_of_prefetch_does_not_seed_what_the_loop_draws_from():
    loader = loader_of(af.data.seed_samples(Noisy(), HERE))
    with pytest.raises(ValueError, match=r"num_workers must be >= 1 under prefetch, .* got 0"):
        next(iter(af.prefetch(loader, HERE)))
