"""Law: the random numbers of a sample depend neither on workers, nor on ranks, nor on the reading
order."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import accel_fn as af
from accel_fn.testing import simulate


class Augmented(Dataset):
    """A data set that draws like augmentation: any number of times, from any global generator."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        drawn = torch.rand(1 + index % 3, dtype=torch.float64).sum().item()
        return torch.tensor([float(index), drawn, random.random(), np.random.random()])


def drawn(num_samples, seed, world_size, **options):
    """Return the draws of every sample, by epoch and number, of all ranks together."""

    def run(state):
        samples = af.data.seed_samples(Augmented(num_samples), state)
        loader = af.shard_loader(DataLoader(samples, **options), state)
        return {
            (epoch.index, int(row[0])): tuple(row[1:].tolist())
            for epoch in loader.epochs(2)
            for batch in epoch
            for row in batch
        }

    ranks = simulate(run, world_size=world_size, seed=seed)
    joined = {place: row for found in ranks for place, row in found.items()}
    assert len(joined) == sum(map(len, ranks)) == 2 * num_samples
    return joined


@given(
    num_samples=st.integers(3, 20),
    batch_size=st.integers(3, 8),
    world_size=st.integers(1, 3),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**63),
)
def test_augmentation_depends_on_seed_epoch_and_number_alone(
    num_samples, batch_size, world_size, shuffle, seed
):
    expected = drawn(num_samples, seed, 1, batch_size=1)
    found = drawn(num_samples, seed, world_size, batch_size=batch_size, shuffle=shuffle)
    assert found == expected
    for generator in range(3):
        assert len({row[generator] for row in expected.values()}) == 2 * num_samples


@pytest.mark.parametrize(
    ("world_size", "shuffle", "persistent"), [(1, False, False), (2, True, True)]
)
def test_augmentation_does_not_depend_on_workers(shuffle, persistent, world_size):
    workers = {"num_workers": 2, "persistent_workers": persistent}
    found = drawn(13, 5, world_size, batch_size=4, shuffle=shuffle, **workers)
    assert found == drawn(13, 5, 1, batch_size=4)
