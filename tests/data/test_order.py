"""Orders are well-mixed permutations of any size, computed at any place without those before it."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.data.order import mix, permute

# of a chi-square test; keys are fixed, so each test gives the same result every time
SIGNIFICANCE = 1e-4
NUM_KEYS = 1000
KEYS = st.integers(0, 2**64 - 1)


def is_bijection(num_samples, key):
    found = permute(torch.arange(num_samples), num_samples, key)
    return found.sort().values.equal(torch.arange(num_samples))


@given(num_samples=st.integers(1, 20_000), key=KEYS)
@example(num_samples=1, key=0)
@example(num_samples=2, key=0)
@example(num_samples=63, key=1)  # the last with more rounds
@example(num_samples=64, key=1)
def test_a_permutation_is_a_bijection(num_samples, key):
    assert is_bijection(num_samples, key)


@given(num_samples=st.integers(2, 2**62), key=KEYS, data=st.data())
@example(num_samples=2**62, key=2**64 - 1, data=None)
@example(num_samples=2**62 - 1, key=0, data=None)
def test_a_permutation_takes_any_places_alone(num_samples, key, data):
    """Different places map to different samples, whichever other places are asked for."""
    places = [0, 1, num_samples // 2, num_samples - 1]
    if data is not None:
        places += data.draw(st.lists(st.integers(0, num_samples - 1), max_size=20))
    found = permute(torch.tensor(places), num_samples, key).tolist()
    assert all(0 <= number < num_samples for number in found)
    assert len(set(found)) == len(set(places))
    assert found == [int(permute(torch.tensor([place]), num_samples, key)) for place in places]


def chi_square(counts):
    """Return how uneven the counts are, if all cells are equally likely."""
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


def chance(chi_square, num_free):
    """Return the probability of a value at least this large."""
    halves = torch.tensor([num_free / 2, chi_square / 2]).double()
    return float(torch.special.gammaincc(*halves))


@pytest.mark.parametrize(
    "num_samples", [8, *[pytest.param(n, marks=pytest.mark.slow) for n in (3, 64)]]
)
def test_small_permutations_are_well_mixed(num_samples):
    """Every sample comes equally often at every place, and after every other sample."""
    places = torch.zeros(num_samples, num_samples).double()
    pairs = torch.zeros(num_samples, num_samples).double()
    for key in range(NUM_KEYS):
        order = permute(torch.arange(num_samples), num_samples, mix(key))
        places[torch.arange(num_samples), order] += 1
        pairs[order[:-1], order[1:]] += 1
    apart = ~torch.eye(num_samples, dtype=torch.bool)
    assert chance(chi_square(places), (num_samples - 1) ** 2) > SIGNIFICANCE
    assert chance(chi_square(pairs[apart]), num_samples * (num_samples - 1) - 1) > SIGNIFICANCE


@pytest.mark.parametrize("num_samples", [100_000, 10**12, 2**62])
def test_large_permutations_are_well_mixed(num_samples):
    """In each order, two neighbours are equally often in any two of 8 parts of the data."""
    num_places, num_parts, num_keys = 4096, 8, 100
    total = 0.0
    for key in range(num_keys):
        start = int(mix(key) % (num_samples - num_places + 1))
        found = permute(torch.arange(start, start + num_places), num_samples, mix(key))
        part = (found.double() / num_samples * num_parts).long().clamp(max=num_parts - 1)
        pairs = torch.bincount(part[0::2] * num_parts + part[1::2], minlength=num_parts**2)
        total += chi_square(pairs.double())
    assert chance(total, num_keys * (num_parts**2 - 1)) > SIGNIFICANCE


@given(num_samples=st.integers(50, 10**6), key=KEYS, other=KEYS)
def test_another_key_is_another_order(num_samples, key, other):
    orders = [permute(torch.arange(50), num_samples, each) for each in (key, other)]
    assert orders[0].equal(orders[1]) == (key == other)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(
    ("batch", "rule"),
    [(3, "in 0 .. [12]"), (-1, "an integer >= 0"), (1.5, "an integer >= 0"), ("a", "an integer")],
)
def test_a_batch_that_is_none_is_refused(batch, rule, windowed):
    given = DataLoader(range(10), batch_size=4)
    loader = af.shard_loader(given, af.DistState(world_size=2))
    loader = af.group_batches(loader, 2) if windowed else loader
    for indices in (loader.indices, loader.global_indices):
        with pytest.raises((ValueError, TypeError), match=f"indices: batch must be {rule}.*, got"):
            indices(0, batch)
