"""window: which batches it joins, and the position of a run that counts windows."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours


def of(num_samples, batch_size=2, state=None, **options):
    data = TensorDataset(torch.arange(num_samples))
    loader = DataLoader(data, batch_size=batch_size, **options)
    return af.shard_loader(loader, state or af.DistState(seed=5))


def ids(windows):
    return [[batch[0].tolist() for batch in batches] for batches in windows]


def test_the_last_window_of_an_epoch_may_be_shorter():
    loader = af.group_batches(of(13), 3)
    assert ids(loader) == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]], [[12]]]
    assert len(loader) == 3


def test_a_state_beyond_the_end_is_refused_in_windows():
    with pytest.raises(ValueError, match="at most at the end of 2 epochs, got 'step 7'"):
        af.group_batches(of(13), 3).epochs(2, since=af.DistState(step=7))


def test_indices_are_those_of_a_window():
    loaders = [of(15, 4, af.DistState(rank=r, world_size=2), shuffle=True) for r in range(2)]
    for loader in loaders:
        windows = af.group_batches(loader, 3)
        for epoch in windows.epochs(2):
            for number, batches in enumerate(ids(epoch)):
                assert windows.indices(epoch.index, number).tolist() == [*chain(*batches)]
                both = [af.group_batches(each, 3).indices(epoch.index, number) for each in loaders]
                together = windows.global_indices(epoch.index, number)
                assert sorted(together.tolist()) == sorted(torch.cat(both).tolist())


@pytest.mark.parametrize(
    "make",
    [
        lambda: list(range(5)),
        lambda: DataLoader(torch.arange(5), batch_size=None),
        lambda: next(iter(af.shard_loader(DataLoader(range(5)), af.DistState()).epochs(1))),
    ],
    ids=["list", "DataLoader", "Epoch"],
)
def test_anything_that_is_iterated_has_windows(make):
    windows = af.group_batches(make(), 2)
    for _ in range(2):
        assert [[int(each) for each in batches] for batches in windows] == [[0, 1], [2, 3], [4]]
    assert len(windows) == 3


@pytest.mark.parametrize("k", [0, 1.5, None])
def test_a_window_has_a_number_of_batches(k):
    with pytest.raises(ValueError, match="group_batches: k must be an integer >= 1, got"):
        af.group_batches([1], k)


def test_what_cannot_be_iterated_has_no_windows():
    with pytest.raises(TypeError, match=r"group_batches: loader must be a loader, .* got 'int'"):
        af.group_batches(3, 2)


class Stream(torch.utils.data.IterableDataset):
    """A stream whose epochs differ in length, without `__len__`."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(10 * self.epoch, 10 * self.epoch + self.sizes[self.epoch]))


@pytest.mark.parametrize("position", [0, 3, 5])
def test_windows_of_a_stream_without_a_length_are_found_by_reading(position):
    def run(state):
        data = DataLoader(Stream(7, 3, 6), batch_size=2)
        loader = af.group_batches(af.shard_loader(data, state), 2)
        with pytest.raises(TypeError, match="must have a __len__"):
            len(loader)
        whole = [(e.index, b) for e in loader.epochs(3) for b in e]
        rest = loader.epochs(3, since=replace(state, step=position))
        return len(whole), [(e.index, b) for e in rest for b in e], whole[position:]

    for length, found, expected in simulate(run, world_size=2):
        assert length == 5
        assert repr(found) == repr(expected)


def test_a_position_behind_an_empty_stream_is_refused():
    loader = af.group_batches(
        af.shard_loader(DataLoader(Stream(4, 0), batch_size=2), af.DistState()), 2
    )
    with pytest.raises(ValueError, match="at the end of epoch 1, which is empty, got '2 steps"):
        loader.epochs(9, since=af.DistState(step=3))


def built(state, num_microbatches=2, loss_fn=ours.mse):
    model = ours.regression_model()
    recipe = af.compose(af.wrap_ddp(), af.accumulate(num_microbatches, split=None))
    return af.build(recipe(af.Plan(loss_fn, model, ours.sgd(model.parameters()))), state)


ONE = (torch.ones(2, 3).double(), torch.ones(2, 1).double())


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            ONE,
            "batch must be a list of micro-batches, got 'tuple'; .* takes what group_batches gives",
        ),
        ([ONE] * 3, r"list of at most 2 micro-batches, got 3; use accumulate\(3, split=None\)"),
    ],
)
def test_what_is_no_window_is_refused_on_every_rank(batch, text):
    def run(state):
        state, step = built(state)
        other = "every rank must be able to count its batch; another rank could not"
        with pytest.raises(ValueError, match=f"step: .*{text if state.is_main else other}"):
            step(state, batch if state.is_main else [ONE])

    simulate(run, world_size=2)


def test_every_batch_of_a_window_is_placed_and_run_on_its_own():
    placed, run = [], []

    def note(state, batch):
        placed.append(batch)
        return batch

    def loss_fn(model, batch):
        run.append(batch)
        return ours.mse(model, batch)

    state, step = built(af.DistState(), loss_fn=loss_fn)
    state, step = af.build(replace(step.plan, place_batch=(note,)), state, check_loss=False)
    other = tuple(2 * rows for rows in ONE)
    step(state, [ONE, other])
    assert [each is known for each, known in zip(placed, [ONE, other], strict=True)] == [True] * 2
    assert [each is known for each, known in zip(run, placed, strict=True)] == [True] * 2
