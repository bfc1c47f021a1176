"""A sampler of the user's own is read at most `read_ahead` batches ahead of the loop, which changes it."""

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

import accel_fn as af
from accel_fn.testing import simulate

SIZE, BATCH_SIZE = 22, 4
WORKERS = {"num_workers": 2, "prefetch_factor": 3}


class Hardest:
    """A sampler that gives the sample of the highest score, which then counts less."""

    def __init__(self):
        self.scores = torch.linspace(0, 1, SIZE, dtype=torch.float64)
        self.num_read = 0

    def __iter__(self):
        for _ in range(SIZE):
            self.num_read += 1
            index = int(self.scores.argmax())
            self.scores[index] -= 1
            yield index

    def __len__(self):
        return SIZE

    def learn(self, batch):
        """Change the scores by what the loop has seen."""
        self.scores[batch] *= 0.5
        self.scores[(sum(batch) * 7) % SIZE] += 2


class Unsized(Hardest):
    """The same without a length."""

    __len__ = None


class Batches(Hardest):
    """A batch sampler of the same order, whose last batch is smaller than three ranks."""

    def __iter__(self):
        samples = super().__iter__()
        for size in (4, 4, 4, 4, 4, 2):
            yield [next(samples) for _ in range(size)]

    def __len__(self):
        return 6


class UnsizedBatches(Batches):
    """The same without a length."""

    __len__ = None


def options_of(sampler):
    """Return the arguments of a DataLoader over it."""
    if isinstance(sampler, Batches):
        return {"batch_sampler": sampler}
    return {"sampler": sampler, "batch_size": BATCH_SIZE}


def trained(batches, sampler, state=None):
    """Return the global batches that a loop sees, and how many samples are read when it has each."""
    seen = []
    for batch in batches:
        numbers = batch.tolist() if state is None else af.gather(batch, state).tolist()
        seen.append((numbers, sampler.num_read))
        sampler.learn(numbers)
    return seen


def by_torch(**options):
    sampler = Hardest()
    return trained(DataLoader(range(SIZE), **options_of(sampler), **options), sampler)


def on_ranks(
    world_size, make=Hardest, read_ahead=None, around=lambda loader, state: loader, **options
):
    """Return what the loop of rank 0 sees, which runs the sampler."""

    def run(state):
        sampler = make()
        loader = DataLoader(range(SIZE), **options_of(sampler), **options)
        loader = around(af.shard_loader(loader, state, read_ahead=read_ahead), state)
        return trained(loader, sampler, state)

    return simulate(run, world_size=world_size)[0]


@pytest.mark.parametrize(("world_size", "options"), [(2, {}), (1, WORKERS)])
def test_a_taught_sampler_gives_the_batches_of_torchs_loader(world_size, options):
    assert on_ranks(world_size, **options) == by_torch(**options)


@pytest.mark.parametrize("read_ahead", [1, 2, 5])
def test_a_taught_sampler_is_read_at_most_so_many_batches_ahead(read_ahead):
    seen = on_ranks(2, read_ahead=read_ahead)
    ahead = [num_read - BATCH_SIZE * number for number, (_, num_read) in enumerate(seen, start=1)]
    assert max(ahead) == read_ahead * BATCH_SIZE - (SIZE % BATCH_SIZE if read_ahead == 5 else 0)
    assert seen == on_ranks(1, read_ahead=read_ahead)


def test_workers_and_a_larger_read_ahead_add_up():
    seen = on_ranks(2, read_ahead=3, num_workers=1)
    ahead = [num_read - BATCH_SIZE * number for number, (_, num_read) in enumerate(seen, start=1)]
    assert max(ahead) == 3 * BATCH_SIZE
    assert seen == on_ranks(1, read_ahead=3, num_workers=1)


@pytest.mark.parametrize(
    ("world_size", "options", "ahead"),
    [
        (2, {}, {"num_workers": 1, "prefetch_factor": 3}),
        (1, {"num_workers": 1, "prefetch_factor": 2}, {"num_workers": 1, "prefetch_factor": 5}),
    ],
    ids=["no worker", "worker"],
)
def test_prefetch_reads_its_depth_further_as_workers_of_torch_would(world_size, options, ahead):
    def prefetched(loader, state):
        return af.prefetch(loader, state, depth=3)

    assert on_ranks(world_size, around=prefetched, **options) == by_torch(**ahead)


@pytest.mark.parametrize("make", [Hardest, Batches, Unsized, UnsizedBatches])
def test_no_batch_is_read_ahead_of_the_loop_in_any_world(make):
    alone = on_ranks(1, make)
    assert [num_read for _, num_read in alone] == [4, 8, 12, 16, 20, SIZE]
    assert on_ranks(3, make) == alone


@pytest.mark.parametrize(
    ("make", "read_ahead", "options", "text"),
    [
        (Hardest, -1, {}, "read_ahead must be an integer >= 0, got -1"),
        (
            Hardest,
            5,
            WORKERS,
            "read_ahead must be >= 6, as the workers read ahead, got 5; use fewer workers or a smaller "
            "prefetch_factor",
        ),
        (
            lambda: WeightedRandomSampler([1.0] * SIZE, SIZE),
            2,
            {},
            "read_ahead must be left out for a loader without a sampler of your own, got 2",
        ),
        (lambda: None, 2, {}, "read_ahead must be left out for a loader without a sampler"),
    ],
    ids=["negative", "workers", "torch's sampler", "in order"],
)
def test_a_read_ahead_that_cannot_be_kept_is_refused(make, read_ahead, options, text):
    def run(state):
        loader = DataLoader(range(SIZE), **options_of(make()), **options)
        with pytest.raises(ValueError, match=f"shard_loader: {text}"):
            af.shard_loader(loader, state, read_ahead=read_ahead)

    simulate(run, world_size=2)


def test_ranks_must_give_the_same_read_ahead():
    def run(state):
        loader = DataLoader(range(SIZE), sampler=Hardest(), batch_size=4)
        with pytest.raises(RuntimeError, match="loader must be the same on every rank"):
            af.shard_loader(loader, state, read_ahead=state.rank)

    simulate(run, world_size=2)


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "prefetch"])
def test_torchs_own_samplers_are_not_read_before_their_epoch_begins(ahead):
    def run(state):
        sampler = WeightedRandomSampler([1.0, *[0.0] * (SIZE - 1)], SIZE)
        loader = DataLoader(range(SIZE), sampler=sampler, batch_size=BATCH_SIZE)
        loader = af.shard_loader(loader, state)
        loader = af.prefetch(loader, state) if ahead else loader
        found = []
        for epoch in list(loader.epochs(3)):
            found.append({number for batch in epoch for number in batch.tolist()})
            sampler.weights = sampler.weights.roll(1)
        return found

    assert simulate(run, world_size=2) == [[{0}, {1}, {2}]] * 2
