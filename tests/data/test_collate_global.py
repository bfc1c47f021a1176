"""`shard_loader(collate="global")`: every rank collates the whole batch, and keeps its rows."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

import accel_fn as af
from accel_fn.testing import simulate
from accel_fn.testing.internals import counted_batches


class Rows(Dataset):
    """A data set that notes what it reads, sample by sample or by a list of indices."""

    def __init__(self, num_samples=10):
        self.num_samples, self.read = num_samples, []

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        self.read.append(index)
        return torch.as_tensor(index).double()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10.0))


def centred(rows):
    inputs = torch.stack(rows)
    return inputs - inputs.mean()


def with_noise(rows):
    return torch.stack(rows) + torch.rand(len(rows))


def joined(rows):
    return torch.stack(rows), torch.ones(1 + len(rows))


def over_ranks(loader, world_size=2, read=list, **options):
    options = {"collate": "global", **options}
    return simulate(
        lambda state: read(af.shard_loader(loader, state, **options)), world_size=world_size
    )


def test_every_rank_reads_the_whole_batch_and_keeps_its_rows():
    data = Rows()
    state = af.DistState(rank=1, world_size=3)
    loader = af.shard_loader(DataLoader(data, 4, collate_fn=centred), state, collate="global")
    assert next(iter(loader)).tolist() == [0.5]
    assert data.read == [0, 1, 2, 3]
    assert loader.indices(0, 0).tolist() == [2]


def test_its_batches_are_not_collated_anew_by_the_check():
    def run(state):
        calls = []

        def collate(rows):
            calls.append(len(rows))
            return centred(rows)[:, None]

        def calls_of_a_step(kind):
            model = torch.nn.Linear(1, 1).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            plan = af.Plan(lambda model, rows: model(rows).mean(), model, optimizer)
            built, step = af.build(af.wrap_ddp()(plan), state)
            given = DataLoader(Rows(4), 4, collate_fn=collate)
            (batch,) = af.shard_loader(given, built, collate=kind)
            before = len(calls)
            step(built, batch)
            return len(calls) - before

        return calls_of_a_step("global"), calls_of_a_step("rank") > 0

    assert simulate(run, world_size=2) == [(0, True)] * 2


def test_lists_of_indices_are_read_whole():
    data = Rows()
    lists = BatchSampler(SequentialSampler(data), 4, drop_last=False)
    options = {"batch_size": None, "sampler": lists, "collate_fn": lambda rows: rows - rows.mean()}
    first, second = over_ranks(DataLoader(data, **options))
    assert torch.cat([first[0], second[0]]).tolist() == [-1.5, -0.5, 0.5, 1.5]


@pytest.mark.parametrize("data", [Rows(), Stream()], ids=["samples", "stream"])
def test_workers_draw_the_same_numbers_on_every_rank(data):
    (whole,) = over_ranks(DataLoader(data, 4, collate_fn=with_noise, num_workers=1), world_size=1)
    options = {"collate_fn": with_noise, "num_workers": 1}
    parts = [
        [*af.shard_loader(DataLoader(data, 4, **options), state, collate="global")]
        for state in (af.DistState(rank=rank, world_size=2) for rank in range(2))
    ]
    for batch, *own in zip(whole, *parts, strict=True):
        assert torch.cat(own).equal(batch)


def test_predictions_are_in_the_order_of_the_data_set():
    def run(state):
        model = torch.nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = af.Plan(lambda model, rows: model(rows[:, None]).mean(), model, optimizer)
        state, step = af.build(af.wrap_ddp()(plan), state)
        loader = DataLoader(Rows(7), 4, shuffle=True, collate_fn=torch.stack)
        loader = af.shard_loader(loader, state, collate="global")
        return af.predict(step, state, loader, lambda model, rows: rows.clone())

    for found in simulate(run, world_size=2):
        assert found is None or found.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_step_knows_of_how_many_samples_its_rows_were_made():
    own = [[0, 1, 2], [3]]
    for options in ({"batch_size": 3}, {"batch_sampler": own}):
        loader = DataLoader(Rows(4), collate_fn=centred, **options)
        sharded = af.shard_loader(loader, af.DistState(rank=1, world_size=2), collate="global")
        counts = [(len(batch), count) for batch, count in counted_batches(sharded)]
        assert counts == [(1, 1), (0, 0)]


def test_tensors_of_different_lengths_are_refused_on_every_rank():
    with pytest.raises(
        ValueError, match=r'what collate_fn returns must hold .* use collate="rank"'
    ):
        over_ranks(DataLoader(Rows(), 4, collate_fn=joined))


def test_ranks_that_collate_otherwise_are_refused():
    def run(state):
        loader = DataLoader(Rows(), batch_sampler=[[0, 1], [2]], collate_fn=centred)
        return af.shard_loader(loader, state, collate="global" if state.is_main else "rank")

    with pytest.raises(RuntimeError, match="loader must be the same on every rank"):
        simulate(run, world_size=2)


def test_other_values_and_split_streams_are_refused():
    state = af.DistState(rank=0, world_size=2)
    loader = DataLoader(Stream(), 4, collate_fn=centred)
    with pytest.raises(ValueError, match='collate must be "rank" or "global", got'):
        af.shard_loader(loader, state, collate="all")
    with pytest.raises(ValueError, match='"round_robin" beside collate="global"'):
        af.shard_loader(loader, state, split="workers", collate="global")
