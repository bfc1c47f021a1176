"""A user's sampler runs on rank 0, and its order is a function of seed and epoch."""

import random
from itertools import chain, combinations

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import accel_fn as af
from accel_fn.testing import simulate
from tests.support.streams import Counting

SIZE = 20
DATA = TensorDataset(torch.arange(SIZE))
WEIGHTS = [1.0 + index for index in range(SIZE)]


class Own:
    """A sampler of the user's; `draw` returns the samples of an epoch."""

    def __init__(self, draw, size=SIZE):
        self.draw, self.size, self.runs = draw, size, 0

    def __iter__(self):
        self.runs += 1
        yield from self.draw(self)

    def __len__(self):
        return self.size


class Unsized(Own):
    """A sampler without a length."""

    __len__ = None


def globally(sampler):
    """Draw from the global generators of torch, Python and NumPy."""
    yield from torch.randperm(SIZE // 2)
    for _ in range(5):
        yield random.randrange(SIZE)
    yield from np.random.permutation(SIZE)[:5]


def shard(world_size=1, rank=0, data=DATA, seed=0, batch="global", **options):
    """Make the loader of a rank, from a state made by hand."""
    state = af.DistState(rank=rank, world_size=world_size, seed=seed)
    return af.shard_loader(DataLoader(data, **options), state, batch=batch)


def samples(epoch):
    return [batch[0].tolist() for batch in epoch]


def everywhere(make, world_size, num_epochs=2, since=None):
    """Return the samples that every rank of a world gets: [rank][epoch][batch]."""

    def run(state):
        loader = af.shard_loader(make(state), state)
        start = None if since is None else af.DistState(step=since)
        return [samples(epoch) for epoch in loader.epochs(num_epochs, since=start)]

    return simulate(run, world_size=world_size)


def joined(ranks):
    """Join them to global batches: [epoch][batch]."""
    return [
        [list(chain.from_iterable(parts)) for parts in zip(*epochs, strict=True)]
        for epochs in zip(*ranks, strict=True)
    ]


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, SIZE),
    "weighted, few": lambda: WeightedRandomSampler(WEIGHTS, 6, replacement=False),
    "subset": lambda: SubsetRandomSampler(range(3, 14)),
    "with replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=70),
    "several times": lambda: RandomSampler(DATA, num_samples=45),
    "own": lambda: Own(globally),
    "own, without length": lambda: Unsized(globally),
    "a list": lambda: [5, 3, 3, 8, 1, 0, 7, 2],
    "another data set's": lambda: torch.utils.data.SequentialSampler(range(7)),
}


@pytest.mark.parametrize("make", [SAMPLERS["own"], SAMPLERS["weighted"]], ids=["own", "weighted"])
def test_iterating_draws_nothing_of_the_users_random_numbers(make):
    def states():
        python, numpy = random.getstate(), np.random.get_state()
        return python, numpy[1].tolist(), numpy[2:], torch.get_rng_state().tolist()

    def seed_all(seed):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    loader = shard(sampler=make(), batch_size=5)
    seed_all(76)
    before = states()
    first = samples(loader)
    assert states() == before
    seed_all(77)
    loader.set_epoch(0)
    assert samples(loader) == first
    assert samples(shard(sampler=make(), batch_size=5, seed=1)) != first


def holders():
    return {
        "torch": (torch.Generator().manual_seed(3), lambda g: torch.randperm(SIZE, generator=g)),
        "numpy": (np.random.default_rng(3), lambda g: g.permutation(SIZE)),
        "numpy's old": (np.random.RandomState(3), lambda g: g.permutation(SIZE)),
        "python": (random.Random(3), lambda g: g.sample(range(SIZE), SIZE)),
    }


@pytest.mark.parametrize("kind", holders())
def test_a_generator_that_a_sampler_holds_is_given_back_as_it_was(kind):
    generator, permutation = holders()[kind]
    sampler = Own(lambda self: permutation(self.held))
    sampler.held = generator
    loader = shard(sampler=sampler, batch_size=6)
    first, second = (samples(epoch) for epoch in loader.epochs(2))
    assert first != second
    assert [samples(epoch) for epoch in loader.epochs(2)] == [first, second]
    untouched, _ = holders()[kind]
    assert permutation(generator).__repr__() == permutation(untouched).__repr__()


def test_long_epochs_are_read_in_pieces_that_draw_as_one():
    data = TensorDataset(torch.arange(30_000))
    sampler = Own(lambda self: (random.randrange(30_000) for _ in range(30_000)), size=30_000)
    loader = shard(data=data, sampler=sampler, batch_size=100)
    whole = samples(loader)
    loader.set_epoch(0)
    other = shard(data=data, sampler=sampler, batch_size=100, seed=5)
    both = [(a[0].tolist(), b[0].tolist()) for a, b in zip(loader, other, strict=True)]
    assert [a for a, _ in both] == whole
    other.set_epoch(0)
    assert [b for _, b in both] == samples(other)


def batches_of(*sizes):
    """Make a batch sampler that reads the data in order, in batches of these sizes."""

    def draw(self):
        start = 0
        for size in sizes:
            yield range(start, start + size)
            start += size

    return Own(draw, size=len(sizes))


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((5, 0, 5), "sampler must give samples, got 'none in batch 1 of epoch 0'"),
        ((), "sampler must give samples, got 'none in epoch 0'"),
    ],
)
def test_a_batch_without_samples_is_refused_on_every_rank(sizes, text):
    def run(state):
        given = DataLoader(DATA, batch_sampler=batches_of(*sizes))
        with pytest.raises(ValueError, match=f"shard_loader: .*{text}"):
            list(af.shard_loader(given, state))

    simulate(run, world_size=3)


def test_a_sampler_that_fails_fails_on_every_rank():
    def broken(self):
        yield from range(7)
        raise KeyError("lost")

    def run(state):
        loader = af.shard_loader(DataLoader(DATA, sampler=Own(broken), batch_size=3), state)
        with pytest.raises((KeyError, RuntimeError), match="lost") as caught:
            list(loader)
        return str(caught.value)

    first, *others = simulate(run, world_size=3)
    assert first == "'lost'"
    assert others == ["shard_loader: failed on rank 0: KeyError('lost')"] * 2


class Opaque:
    """A data set that cannot be pickled."""

    def __reduce__(self):
        raise TypeError("opaque")


def test_samples_whose_names_cannot_be_sent_fail_on_every_rank():
    def run(state):
        sampler = Own(lambda self: [Opaque()] * 4, size=4)
        with pytest.raises((TypeError, RuntimeError), match="opaque"):
            list(af.shard_loader(DataLoader(DATA, sampler=sampler, batch_size=2), state))

    simulate(run, world_size=2)


def test_samples_may_have_names():
    data = {f"sample {index}": index for index in range(6)}
    ranks = everywhere(
        lambda state: DataLoader(
            data,
            sampler=sorted(data, reverse=True),
            batch_size=4,
            collate_fn=lambda s: [torch.tensor(s)],
        ),
        2,
        1,
    )
    assert joined(ranks) == [[[5, 4, 3, 2], [1, 0]]]


@pytest.mark.parametrize("ask", [len, lambda loader: len(next(loader.epochs(1)))])
def test_the_length_of_a_sampler_that_has_none_is_refused(ask):
    with pytest.raises(
        TypeError,
        match=r"len: the loader's sampler must have a length, got .*give the sampler a __len__",
    ):
        ask(shard(sampler=Unsized(globally), batch_size=6))


@pytest.mark.parametrize("sizes", [(3, 4, 5), (4, 4, 1), (4,)])
def test_the_length_of_a_batch_sampler_is_the_number_of_its_batches(sizes):
    """One rank may ask for the length alone."""

    def run(state):
        loader = af.shard_loader(DataLoader(DATA, batch_sampler=batches_of(*sizes)), state)
        num_batches = len(list(loader))
        if state.is_main:
            assert len(loader) == len(next(loader.epochs(1))) == num_batches
            assert len(af.group_batches(loader, 2)) == -(-num_batches // 2)

    simulate(run, world_size=3)


def test_the_length_of_a_batch_sampler_is_known_without_running_it():
    sampler = batches_of(4, 4, 1)
    loader = shard(world_size=3, batch_sampler=sampler)
    assert (len(loader), sampler.runs) == (3, 0)


@pytest.mark.parametrize(("size", "word"), [(SIZE - 3, "more"), (SIZE + 5, "fewer")])
def test_a_length_that_is_not_kept_is_refused(size, word):
    loader = shard(3, sampler=Own(globally, size=size), batch_size=3)
    with pytest.raises(
        ValueError,
        match=f"sampler must give as many samples as its len, {size}, in every epoch, got {word} in "
        "epoch 0; correct its __len__, or leave it out",
    ):
        list(loader)


def test_a_state_beyond_the_end_is_refused_on_every_rank():
    def run(state):
        loader = af.shard_loader(DataLoader(DATA, sampler=Unsized(globally), batch_size=5), state)
        with pytest.raises(
            ValueError, match="since must be at most at the end of 2 epochs, got 'step 9'"
        ):
            loader.epochs(2, since=af.DistState(step=9))

    simulate(run, world_size=2)


def test_ranks_in_different_epochs_raise():
    def run(state):
        loader = af.shard_loader(DataLoader(DATA, sampler=Own(globally), batch_size=4), state)
        epoch = list(loader.epochs(2))[state.rank]
        with pytest.raises(
            RuntimeError,
            match="got epoch 1 from batch 0 on rank 1 and epoch 0 from batch 0 on rank 0",
        ):
            next(iter(epoch))

    simulate(run, world_size=2)


def test_indices_are_those_of_a_batch():
    loader = shard(world_size=2, rank=1, sampler=Own(globally), batch_size=6)
    whole = samples(shard(sampler=Own(globally), batch_size=6))
    assert loader.global_indices(0, 1).tolist() == whole[1]
    assert loader.indices(0, 1).tolist() == whole[1][3:]
    with pytest.raises(ValueError, match="indices: batch must be one of epoch 0, got 4"):
        loader.indices(0, 4)


def test_indices_of_a_sampler_on_rank_0_are_refused():
    def run(state):
        loader = af.shard_loader(DataLoader(DATA, sampler=Own(globally), batch_size=6), state)
        with pytest.raises(
            ValueError, match=r"indices: loader must go through its data in order .*rank 0 alone"
        ):
            loader.indices(0, 0)

    simulate(run, world_size=2)


def test_indices_that_are_no_numbers_are_refused():
    loader = shard(data={"a": 0, "b": 1}, sampler=["a", "b"], batch_size=2)
    with pytest.raises(
        ValueError, match="indices: sampler must name samples by whole numbers, got 'a'"
    ):
        loader.indices(0, 0)


REFUSED = {
    "batch of one rank": (
        {"batch_sampler": batches_of(4, 4)},
        "per_rank",
        "loader must have a batch_size where that is to be one rank's, got 'Own'; .*use batch=\"global\"",
    ),
    "no samples": ({"sampler": [], "batch_size": 4}, "global", "sampler must have a sample, got 0"),
    "all dropped": (
        {"sampler": [3, 4], "batch_size": 4, "drop_last": True},
        "global",
        "drop_last=True must leave a batch, got 2 samples for batch_size=4",
    ),
    "sharded inside": (
        {"batch_sampler": BatchSampler(torch.utils.data.DistributedSampler(DATA, 2, 0), 4, False)},
        "global",
        "loader must not be sharded over ranks already, got 'DistributedSampler'",
    ),
}


@pytest.mark.parametrize(("options", "batch", "text"), REFUSED.values(), ids=REFUSED)
def test_what_a_sampler_cannot_give_all_ranks_is_refused_on_every_rank(options, batch, text):
    def run(state):
        with pytest.raises(ValueError, match=f"shard_loader: {text}"):
            af.shard_loader(DataLoader(DATA, **options), state, batch=batch)

    simulate(run, world_size=2)


DIFFERENT = {
    "data": lambda rank: DataLoader(range(SIZE + rank), sampler=range(SIZE), batch_size=4),
    "length": lambda rank: DataLoader(DATA, sampler=range(SIZE - rank), batch_size=4),
    "batch size": lambda rank: DataLoader(DATA, sampler=range(SIZE), batch_size=4 + rank),
    "drop_last": lambda rank: DataLoader(
        DATA, sampler=range(SIZE), batch_size=6, drop_last=bool(rank)
    ),
    "subset": lambda rank: DataLoader(
        DATA, sampler=SubsetRandomSampler(range(rank, rank + 8)), batch_size=4
    ),
    "range": lambda rank: DataLoader(DATA, sampler=range(rank, 20, 2), batch_size=4),
    "list": lambda rank: DataLoader(DATA, sampler=list(range(rank, 20, 2)), batch_size=4),
    "batches": lambda rank: DataLoader(DATA, batch_sampler=[[rank, 2], [4, 5, 6 + rank]]),
    "workers": lambda rank: DataLoader(DATA, sampler=range(SIZE), batch_size=4, num_workers=rank),
    "kind": lambda rank: DataLoader(DATA, sampler=[range(SIZE), None][rank], batch_size=4),
}


@pytest.mark.parametrize("make", DIFFERENT.values(), ids=DIFFERENT)
def test_ranks_must_give_the_same_loader(make):
    def run(state):
        with pytest.raises(RuntimeError, match="loader must be the same on every rank, got "):
            af.shard_loader(make(state.rank), state)

    simulate(run, world_size=2)


KINDS = {
    "map": lambda: DataLoader(DATA, batch_size=4),
    "own sampler": lambda: DataLoader(DATA, sampler=range(SIZE), batch_size=4),
    "stream": lambda: DataLoader(Counting(SIZE), batch_size=4),
}


@pytest.mark.parametrize(
    ("kinds", "split", "text"),
    [
        (kinds, "auto", "shard_loader: loader must be the same on every rank, got ")
        for kinds in combinations(KINDS, 2)
    ]
    + [(("stream", "map"), "workers", "split must be left out for a data set that can be indexed")],
)
def test_ranks_must_give_the_same_kind_of_loader(kinds, split, text):
    """All ranks raise and none waits, even if one has a stream and another data with indices."""

    def run(state):
        with pytest.raises((RuntimeError, ValueError), match=text) as caught:
            af.shard_loader(KINDS[kinds[state.rank > 0]](), state, split=split)
        return str(caught.value)

    texts = set(simulate(run, world_size=3, timeout_s=100))
    # a rank that got another rank's error reports it as such
    assert len(texts) == (1 if split == "auto" else 2)


def test_a_list_in_another_order_on_each_rank_is_split_as_rank_0_has_it():
    lists = [[3, 1, 2, 0], [0, 1, 2, 3]]

    def run(state):
        loader = DataLoader(range(4), sampler=lists[state.rank], batch_size=4)
        return [batch.tolist() for batch in next(iter(af.shard_loader(loader, state).epochs(1)))]

    assert simulate(run, world_size=2) == [[[3, 1]], [[2, 0]]]


def split_with(seed):
    generator = torch.Generator().manual_seed(seed)
    return random_split(DATA, [12, 8], generator=generator)[0]


OWN = {
    "subset": lambda rank: Subset(DATA, range(10 * rank, 10 * rank + 10)),
    "subset of a subset": lambda rank: Subset(Subset(DATA, range(rank, 18)), [0, 3, 4, 5]),
    "random_split": split_with,
    "joined": lambda rank: ConcatDataset([DATA, split_with(rank)]),
    "names": lambda rank: Subset({"a": 0, "b": 1, "c": 2}, ["abc"[rank], "c", "c", "c"]),
}


@pytest.mark.parametrize("sampled", [False, True], ids=["in order", "own sampler"])
@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_samples_of_a_ranks_own_are_refused(make, sampled):
    def loader(rank):
        options = {"sampler": [0, 1, 2, 3]} if sampled else {}
        return DataLoader(make(rank), batch_size=4, **options)

    def run(state):
        with pytest.raises(
            RuntimeError, match="data set must be the same on every rank, got samples of checksum"
        ):
            af.shard_loader(loader(state.rank), state)
        af.shard_loader(loader(0), state)

    simulate(run, world_size=2)


class Wrapping:
    """A sampler that holds another one under an unusual name."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda sampler: Wrapping(Wrapping(sampler)),
        lambda sampler: Wrapping([sampler, range(3)]),
        lambda sampler: BatchSampler(Wrapping(sampler), 4, False),
    ],
    ids=["held", "in a list", "in a batch sampler"],
)
def test_a_distributed_sampler_is_found_wherever_it_is_held(wrap):
    sampler = wrap(torch.utils.data.DistributedSampler(DATA, 2, 0))
    options = {"batch_sampler" if isinstance(sampler, BatchSampler) else "sampler": sampler}
    with pytest.raises(ValueError, match="sharded over ranks already, got 'DistributedSampler'"):
        shard(**options)


class Counted(torch.utils.data.Dataset):
    """A data set without a length, with a sampler that has one."""

    def __getitem__(self, index):
        return torch.tensor([index])


class LengthNotImplemented(Counted):
    def __len__(self):
        raise NotImplementedError


@pytest.mark.parametrize("kind", [Counted, LengthNotImplemented])
def test_a_data_set_without_a_length_needs_a_sampler(kind):
    with pytest.raises(
        TypeError, match=f"data set must have a length, or a sampler, got '{kind.__name__}'"
    ):
        shard(data=kind(), batch_size=2)
    assert [b.flatten().tolist() for b in shard(data=kind(), sampler=[4, 2], batch_size=2)] == [
        [4, 2]
    ]
