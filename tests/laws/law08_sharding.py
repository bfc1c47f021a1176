"""Law 8: shards partition the global batch, which does not depend on the world; seeking equals
iterating."""

from dataclasses import dataclass
from itertools import chain

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours


@dataclass(frozen=True)
class Case:
    """What determines the batches of a loader, and the number of ranks that share them."""

    batch_size: int
    world_size: int
    drop_last: bool
    num_samples: int
    shuffle: bool
    seed: int

    def loaders(self, world_size=None, **options):
        """Make the loader of each rank."""
        world_size = world_size or self.world_size
        data = TensorDataset(torch.arange(self.num_samples))
        options |= {"shuffle": self.shuffle, "drop_last": self.drop_last}
        loader = DataLoader(data, batch_size=self.batch_size, **options)
        states = [
            af.DistState(rank=rank, world_size=world_size, seed=self.seed)
            for rank in range(world_size)
        ]
        return [af.shard_loader(loader, state) for state in states]


@st.composite
def cases(draw, max_world=8, max_samples=200, max_batch=64):
    """Draw any order that a loader may ask for."""
    world_size = draw(st.integers(1, max_world))
    num_samples = draw(st.integers(1, max_samples))
    batch_size = draw(st.integers(1, max_batch))
    drop_last = draw(st.booleans()) and num_samples >= batch_size
    shuffle, seed = draw(st.booleans()), draw(st.integers(0, 9))
    return Case(batch_size, world_size, drop_last, num_samples, shuffle, seed)


TAIL = Case(4, 3, False, 9, True, 0)
"""The last batch is smaller than the world."""


@ours.share(2)
@given(case=cases(), epoch=st.integers(0, 5), other=st.integers(1, 8))
@example(case=TAIL, epoch=1, other=1)
def test_the_parts_of_the_ranks_are_a_global_batch_that_does_not_depend_on_the_world(
    case, epoch, other
):
    loaders, elsewhere = case.loaders(), case.loaders(other)[-1]
    seen = []
    assert {len(each) for each in loaders} == {len(elsewhere)}
    for batch in range(len(elsewhere)):
        parts = [each.indices(epoch, batch) for each in loaders]
        whole = torch.cat(parts)
        assert whole.equal(loaders[0].global_indices(epoch, batch))
        assert whole.equal(elsewhere.global_indices(epoch, batch))
        sizes = [len(part) for part in parts]
        assert sum(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        seen += whole.tolist()
    dropped = case.num_samples % case.batch_size if case.drop_last else 0
    assert len(seen) == len(set(seen)) == case.num_samples - dropped
    assert set(seen) <= set(range(case.num_samples))


@given(runs=st.sets(st.tuples(st.integers(0, 10**6), st.integers(0, 9)), min_size=2, max_size=5))
@example(runs={(1, 0), (0, 1)})
def test_each_epoch_of_each_seed_has_an_order_of_its_own(runs):
    """Two orders of 32 samples are not the same by chance."""
    found = set()
    for epoch, seed in runs:
        (loader,) = Case(32, 1, False, num_samples=32, shuffle=True, seed=seed).loaders()
        found.add(tuple(loader.global_indices(epoch, 0).tolist()))
    assert len(found) == len(runs)


def check_loaders(case, position, **options):
    """Assert that loaders give each rank its indices, epoch after epoch, and so from any position."""
    for loader in case.loaders(**options):
        epochs = [*loader.epochs(3)]
        whole = [[batch[0].tolist() for batch in epoch] for epoch in epochs]
        assert {len(loader)} == {*map(len, whole)} == {*map(len, epochs)}
        for epoch, batches in enumerate(whole):
            expected = [loader.indices(epoch, batch).tolist() for batch in range(len(loader))]
            assert batches == expected
        flat = [batch for batches in whole for batch in batches]
        start = min(position, len(flat))
        resumed = loader.epochs(3, since=af.DistState(step=start))
        assert [batch[0].tolist() for epoch in resumed for batch in epoch] == flat[start:]


@given(case=cases(max_samples=40, max_batch=12, max_world=4), position=st.integers(0, 60))
@example(case=TAIL, position=4)
def test_loaders_follow_the_order_and_resume_at_any_batch(case, position):
    check_loaders(case, position)


@ours.share(0.16)
@given(case=cases(max_world=1, max_samples=40), position=st.integers(0, 9))
def test_workers_change_nothing(case, position):
    check_loaders(case, position, num_workers=2)


class Rows:
    """Samples as dicts, each with a text."""

    def __init__(self, *columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, index):
        inputs, targets = (column[index] for column in self.columns)
        return {"inputs": inputs, "targets": targets, "text": f"text {index}"}


class TakenApart:
    """A collate_fn that takes fields out of its samples, and is never given no sample."""

    def __call__(self, samples):
        assert samples
        targets = torch.stack([each.pop("targets") for each in samples])
        return {**torch.utils.data.default_collate(samples), "targets": targets}


KINDS = {
    "rows": lambda *columns: {"dataset": TensorDataset(*columns)},
    "samples": lambda *columns: {"dataset": [*zip(*columns, strict=True)]},
    "dicts": lambda *columns: {"dataset": Rows(*columns)},
    "own collate": lambda *columns: {"dataset": Rows(*columns), "collate_fn": TakenApart()},
    "sampler": lambda *columns: {
        "dataset": TensorDataset(*columns),
        "sampler": [*reversed(range(len(columns[0])))],
    },
    "stream": lambda *columns: {"dataset": Items([*zip(*columns, strict=True)])},
    "shards": lambda *columns: {"dataset": ShardedItems([*zip(*columns, strict=True)])},
}


class Items(torch.utils.data.IterableDataset):
    """A stream."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class ShardedItems(Items):
    """A stream of which all but one shard are empty."""

    num_shards = 8

    def shard(self, *, num_shards, index):
        return Items(self.items if index == num_shards - 1 else [])


@ours.share(0.34)
@given(
    kind=st.sampled_from([*KINDS]),
    batch_size=st.integers(1, 9),
    num_samples=st.integers(1, 20),
    world_size=st.integers(1, 4),
    prefetches=st.booleans(),
    k=st.integers(1, 2),
)
@example(kind="rows", batch_size=16, num_samples=66, world_size=4, prefetches=False, k=1)
@example(kind="dicts", batch_size=4, num_samples=5, world_size=3, prefetches=True, k=2)
@example(kind="shards", batch_size=2, num_samples=3, world_size=4, prefetches=False, k=1)
def test_training_on_any_world_is_training_on_one_rank(
    kind, batch_size, num_samples, world_size, prefetches, k
):
    """The loop unpacks each batch. Tails, batches and data sets may be smaller than the world."""
    generator = torch.Generator().manual_seed(num_samples)
    columns = [torch.randn(num_samples, n, generator=generator).double() for n in (3, 1)]

    def run(state):
        model = ours.regression_model()
        plan = af.Plan(ours.mse, model, ours.adamw(model.parameters()))
        transforms = af.compose(af.wrap_ddp(), af.clip(0.5), af.accumulate(k))
        state, step = af.build(transforms(plan), state)
        loader = af.shard_loader(DataLoader(**KINDS[kind](*columns), batch_size=batch_size), state)
        loader = af.prefetch(loader, state) if prefetches else loader
        for batch in chain.from_iterable(loader.epochs(2, since=state)):
            if isinstance(batch, dict):
                assert len(batch["text"]) == len(batch["inputs"])
                batch = batch["inputs"], batch["targets"]
            inputs, targets = batch
            state, _ = step(state, (inputs, targets))
        return state.step, model.state_dict()

    expected = simulate(run, world_size=1)[0]
    ranks = simulate(run, world_size=world_size)
    assert len({step for step, _ in ranks}) == 1
    for step, parameters in ranks:
        if kind != "shards":  # their batches depend on the world
            assert step == expected[0] == 2 * -(-num_samples // batch_size)
            ours.assert_close(parameters, expected[1])


def centred(rows):
    """Collate rows to what depends on all of them, texts and a number among it."""
    inputs, numbers = torch.stack([row[0] for row in rows]), [int(row[1]) for row in rows]
    texts = [f"row {number}" for number in numbers]
    return {"inputs": inputs - inputs.mean(0), "sum": torch.tensor(sum(numbers)), "texts": texts}


SOURCES = {
    "samples": lambda rows, size: {"dataset": rows, "batch_size": size},
    "shuffled": lambda rows, size: {"dataset": rows, "batch_size": size, "shuffle": True},
    "stream": lambda rows, size: {"dataset": Items(rows), "batch_size": size},
    "shards": lambda rows, size: {"dataset": ShardedItems(rows), "batch_size": size},
    "own sampler": lambda rows, size: {
        "dataset": rows,
        "batch_sampler": [[*range(len(rows))][i : i + size] for i in range(0, len(rows), size)],
    },
}


@ours.share(0.34)
@given(
    source=st.sampled_from([*SOURCES]),
    batch_size=st.integers(1, 9),
    num_samples=st.integers(1, 20),
    world_size=st.integers(1, 4),
)
@example(source="samples", batch_size=4, num_samples=5, world_size=3)  # a tail of one sample
@example(source="own sampler", batch_size=4, num_samples=5, world_size=3)
@example(source="stream", batch_size=4, num_samples=5, world_size=3)
def test_rows_of_ranks_that_collate_globally_are_the_batch_of_one_process(
    source, batch_size, num_samples, world_size
):
    generator = torch.Generator().manual_seed(num_samples)
    inputs = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)
    rows = [*zip(inputs, range(num_samples), strict=True)]

    def run(state):
        loader = DataLoader(**SOURCES[source](rows, batch_size), collate_fn=centred)
        return [*af.shard_loader(loader, state, collate="global")]

    (whole,) = simulate(run, world_size=1)
    of_ranks = simulate(run, world_size=world_size)
    assert {*map(len, of_ranks)} == {len(whole)}
    for batch, *parts in zip(whole, *of_ranks, strict=True):
        assert torch.cat([part["inputs"] for part in parts]).equal(batch["inputs"])
        assert [text for part in parts for text in part["texts"]] == batch["texts"]
        assert {int(part["sum"]) for part in parts} == {int(batch["sum"])}
        sizes = [len(part["inputs"]) for part in parts]
        assert sizes == [len(part["texts"]) for part in parts]
        assert max(sizes) - min(sizes) <= 1
