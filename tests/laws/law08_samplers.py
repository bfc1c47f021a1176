"""Law 8 for users' samplers: one order on every rank, and seeking equals iterating."""

import random
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours


class Global:
    """A sampler that draws from the three global generators, without replacement."""

    def __init__(self, num_samples, sized):
        self.num_samples = num_samples
        if not sized:
            self.__class__ = Unsized

    def __iter__(self):
        order = torch.randperm(self.num_samples).tolist()
        shift = random.randrange(self.num_samples) + np.random.randint(self.num_samples)
        return iter([(index + shift) % self.num_samples for index in order])

    def __len__(self):
        return self.num_samples


class Unsized(Global):
    """The same sampler without a length."""

    __len__ = None


class Buckets:
    """A batch sampler with batches of any sizes."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        order = torch.randperm(sum(self.sizes)).tolist()
        for size in self.sizes:
            yield [order.pop() for _ in range(size)]

    def __len__(self):
        return len(self.sizes)


ONCE = ("own", "unsized", "subset", "buckets")


@st.composite
def sampled(draw, min_samples=1, max_world=8):
    """Draw a world size, a sampler and its kind."""
    world_size = draw(st.integers(1, max_world))
    kind = draw(st.sampled_from([*ONCE, "weighted", "again"]))
    if kind == "buckets":
        sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
        return world_size, kind, sum(sizes), {"batch_sampler": Buckets(sizes)}
    batch_size = draw(st.integers(1, 64))
    drop_last = draw(st.booleans())
    num_samples = draw(st.integers(batch_size if drop_last else min_samples, 200))
    data = range(num_samples)
    sampler = {
        "own": lambda: Global(num_samples, sized=True),
        "unsized": lambda: Global(num_samples, sized=False),
        "subset": lambda: SubsetRandomSampler(data),
        "weighted": lambda: WeightedRandomSampler([1.0 + each for each in data], num_samples),
        "again": lambda: RandomSampler(data, replacement=True),
    }[kind]()
    options = {"sampler": sampler, "batch_size": batch_size, "drop_last": drop_last}
    return world_size, kind, num_samples, options


def passes(case, world_size, *, seed, step=0, num_epochs=2, num_workers=0):
    """Return [rank][batch] of `num_epochs` epochs, the batches of an epoch, and what `len`
    returns."""
    _, _, num_samples, options = case
    data = TensorDataset(torch.arange(num_samples))

    def run(state):
        loader = af.shard_loader(DataLoader(data, num_workers=num_workers, **options), state)
        epochs = loader.epochs(num_epochs, since=af.DistState(step=step))
        seen = [[batch[0].tolist() for batch in epoch] for epoch in epochs]
        try:
            length = len(loader)
        except TypeError:
            length = None
        return seen, length

    return simulate(run, world_size=world_size, seed=seed)


def in_all(ranks):
    """Join every rank's parts to global batches, epoch by epoch."""
    epochs = zip(*[seen for seen, _ in ranks], strict=True)
    return [
        [list(chain.from_iterable(parts)) for parts in zip(*epoch, strict=True)] for epoch in epochs
    ]


def flat(ranks):
    """Flatten to [rank][batch], epoch after epoch."""
    return [list(chain.from_iterable(epochs)) for epochs, _ in ranks]


def check(case, seed, num_workers=0):
    """Check the law for one sampler."""
    world_size, kind, num_samples, options = case
    ranks = passes(case, world_size, seed=seed, num_workers=num_workers)
    alone = in_all(passes(case, 1, seed=seed))
    for epoch, expected in zip(in_all(ranks), alone, strict=True):
        assert epoch == expected
        every = list(chain.from_iterable(epoch))
        left_out = num_samples % options["batch_size"] if options.get("drop_last") else 0
        assert len(every) == num_samples - left_out
        if kind in ONCE:
            assert len(set(every)) == len(every)
    for parts in zip(*[seen[0] for seen, _ in ranks], strict=True):
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
    for seen, length in ranks:
        if kind == "unsized":
            assert length is None
        else:
            assert length == len(seen[0])


@ours.share(0.5)
@given(case=sampled(), seed=st.integers(0, 9))
@example(case=(3, "buckets", 9, {"batch_sampler": Buckets([4, 4, 1])}), seed=0)
def test_the_order_does_not_depend_on_the_world(case, seed):
    check(case, seed)


@pytest.mark.slow
@ours.share(0.16)
@given(case=sampled(max_world=2), seed=st.integers(0, 9))
def test_workers_change_nothing(case, seed):
    check(case, seed, num_workers=2)


@ours.share(0.5)
@given(case=sampled(max_world=3), position=st.integers(0, 80))
def test_resuming_at_any_batch_is_going_on(case, position):
    whole = flat(passes(case, case[0], seed=1, num_epochs=3))
    step = min(position, len(whole[0]))
    rest = flat(passes(case, case[0], seed=1, num_epochs=3, step=step))
    assert rest == [batches[step:] for batches in whole]
