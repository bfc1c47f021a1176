"""Epochs up to a number of steps, and the numbers of their batches."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import accel_fn as af
from accel_fn.testing import simulate


class Stream(IterableDataset):
    """Numbers without a length: fewer in later epochs, if told so."""

    def __init__(self, sizes=(6,)):
        self.sizes = sizes
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(self.sizes[min(self.epoch, len(self.sizes) - 1)]))


class Unsized(BatchSampler):
    __len__ = None


LOADERS = {
    "order": lambda: DataLoader(range(6), batch_size=2, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "sampler": lambda: DataLoader(
        range(6), batch_sampler=Unsized(SequentialSampler(range(6)), 2, False)
    ),
}
loaders = pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)


def read(loader, num_epochs, **options):
    """Return the number of each epoch and of each batch in it, with the batch."""
    return [
        (epoch.index, number, batch.tolist())
        for epoch in loader.epochs(num_epochs, **options)
        for number, batch in epoch.enumerate()
    ]


@loaders
@pytest.mark.parametrize("max_steps", [0, 1, 3, 100])
def test_a_run_of_so_many_steps_is_the_start_of_a_longer_one(make, max_steps):
    def run(state):
        loader = af.shard_loader(make(), state)
        return read(loader, 4), read(loader, 4, max_steps=max_steps)

    for every, some in simulate(run, world_size=2):
        assert some == every[:max_steps]


@loaders
@pytest.mark.parametrize("step", [2, 3])
def test_a_run_that_resumes_ends_at_the_same_step_and_counts_batches_as_before(make, step):
    def run(state):
        loader = af.shard_loader(make(), state)
        since = af.DistState(step=step)
        return read(loader, None, max_steps=8), read(loader, None, max_steps=8, since=since)

    for every, rest in simulate(run, world_size=2):
        assert len(every) == 8
        assert rest == every[step:]


def test_evaluate_reads_no_more_than_the_epoch(tmp_path):
    model = torch.nn.Linear(1, 1)
    plan = af.Plan(lambda model, x: x.double().mean(), model, torch.optim.SGD(model.parameters()))
    state, step = af.build(plan, af.DistState())
    loader = af.shard_loader(DataLoader(range(6), batch_size=2), state)
    (epoch,) = loader.epochs(1, max_steps=2)
    assert af.evaluate(step, state, epoch)["loss"] == 1.5


def test_a_run_that_has_consumed_its_steps_yields_no_epoch_and_logs_that(capsys):
    loader = af.shard_loader(LOADERS["order"](), af.DistState())
    assert read(loader, None, max_steps=4, since=af.DistState(step=4)) == []
    assert capsys.readouterr().err == (
        "the run has finished: 4 steps; begin a new run with a state at step 0, such as init returns\n"
    )
    with pytest.raises(
        ValueError,
        match="since must be at most at step 4, got 'step 5'; raise max_steps, or begin a",
    ):
        loader.epochs(None, max_steps=4, since=af.DistState(step=5))


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        (None, {}, "num_epochs must be an integer >= 0, got None; or give max_steps beside None"),
        (2, {"max_steps": -1}, "max_steps must be an integer >= 0, got -1"),
        (2, {"max_steps": 1.5}, "max_steps must be an integer >= 0, got 1.5"),
    ],
)
def test_the_end_of_a_run_is_given_by_integers(given, options, text):
    loader = af.shard_loader(LOADERS["order"](), af.DistState())
    with pytest.raises(ValueError, match=f"epochs: {text}"):
        loader.epochs(given, **options)


def test_epochs_without_batches_are_refused_where_nothing_else_ends_the_run():
    loader = af.shard_loader(DataLoader(Stream(sizes=(4, 0)), batch_size=2), af.DistState())
    with pytest.raises(
        ValueError,
        match="loader must give a batch in every epoch where num_epochs is None, got none in epoch 1",
    ):
        read(loader, None, max_steps=3)
    assert len(read(loader, 3, max_steps=3)) == 2
