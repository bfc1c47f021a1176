"""A loop by range goes through one pass after the other, and a loader knows where it is."""

import re
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import accel_fn as af
from accel_fn.testing import simulate
from tests.data.test_set_epoch import Curriculum
from tests.support import strategies as ours

HERE = af.DistState()


def of(size=10, state=HERE, **options):
    return af.shard_loader(
        DataLoader(torch.arange(size), batch_size=4, shuffle=True, **options), state
    )


def orders(loader, num_epochs=3):
    return [[batch.tolist() for batch in epoch] for epoch in loader.epochs(num_epochs)]


VIEWS = {
    "plain": lambda loader: loader,
    "prefetch": lambda loader: af.prefetch(loader, HERE),
    "window": lambda loader: af.group_batches(loader, 2),
    "both": lambda loader: af.prefetch(af.group_batches(loader, 2), HERE),
}


def numbers_of(batch):
    return torch.cat(batch).tolist() if isinstance(batch, list) else batch.tolist()


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_that_is_made_anew_in_each_pass_goes_on_counting(view):
    loader = of()
    found = [[numbers_of(batch) for batch in view(loader)] for _ in range(3)]
    assert found == [[numbers_of(batch) for batch in epoch] for epoch in view(of()).epochs(3)]
    assert loader.epoch == 3


def test_a_peek_counts_and_a_look_at_the_loader_that_was_split_does_not():
    loader = of()
    next(iter(loader.loader))
    assert loader.epoch == 0
    next(iter(loader))
    assert loader.epoch == 1
    assert [batch.tolist() for batch in loader] == orders(of())[1]


def test_evaluate_and_predict_count_nothing_and_read_epoch_0():
    model = torch.nn.Linear(1, 1)
    plan = af.Plan(lambda model, x: x.double().mean(), model, torch.optim.SGD(model.parameters()))
    state, step = af.build(plan, HERE)
    loader = of(state=state)
    next(iter(loader))
    before = loader.state_dict()
    seen = []
    af.predict(step, state, loader, lambda model, x: seen.append(x.tolist()) or {"x": x})
    af.evaluate(step, state, loader)
    assert loader.state_dict() == before
    assert seen == orders(of())[0]


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_position_counts_what_the_loop_has_received(view):
    loader = of(20)
    found = []
    for _ in range(2):
        batches = iter(view(loader))
        for _ in batches:
            saved = loader.state_dict()
            found.append((saved["epoch"], saved["batch"]))
    each = 2 if isinstance(next(iter(view(of()))), list) else 1
    expected = [(epoch, batch) for epoch in (0, 1) for batch in range(each, 5, each)]
    ends = [*expected[: len(expected) // 2], (1, 0), *expected[len(expected) // 2 :], (2, 0)]
    assert found == ends


def test_only_facts_are_compared_and_may_come_without_a_position():
    loader = of()
    saved = loader.state_dict()
    list(loader)
    assert loader.differences_from(saved) == []
    loader.load_state_dict({key: saved[key] for key in saved if key not in ("epoch", "batch")})
    assert loader.epoch == 1


def test_a_position_within_a_window_is_refused():
    loader = of()
    loader.load_state_dict({"epoch": 1, "batch": 1})
    with pytest.raises(
        ValueError,
        match="iter: loader must begin with a window of 2 batches, got 'batch 1 of epoch 1'",
    ):
        iter(af.group_batches(loader, 2))


# -- data sets and samplers with `set_epoch`


class Around(Dataset):
    """A user's own wrapper, which knows nothing of epochs."""

    def __init__(self, inner):
        self.parts = {"inner": inner}

    def __len__(self):
        return len(self.parts["inner"])

    def __getitem__(self, index):
        return self.parts["inner"][index]


class AroundStream(IterableDataset):
    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)


class Order(Sampler):
    """Gives its epoch as the number of each sample."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch] * 6)

    def __len__(self):
        return 6


class Outer(Sampler):
    def __init__(self, inner):
        self.wrapped = [inner]

    def __iter__(self):
        return iter(self.wrapped[0])

    def __len__(self):
        return len(self.wrapped[0])


class Epochal(IterableDataset):
    def __init__(self):
        self._epoch = 0

    def set_epoch(self, epoch):
        self._epoch = epoch

    def __iter__(self):
        return iter([100 * self._epoch] * 6)


KINDS = {
    "data set": lambda: (data := Curriculum(), {"dataset": data}),
    "data set in a data set": lambda: (data := Curriculum(), {"dataset": Around(Around(data))}),
    "stream": lambda: (data := Epochal(), {"dataset": data}),
    "stream in a stream": lambda: (data := Epochal(), {"dataset": AroundStream(data)}),
    "sampler": lambda: (s := Order(), {"dataset": range(0, 900, 100), "sampler": s}),
    "sampler in a sampler": lambda: (
        s := Order(),
        {"dataset": range(0, 900, 100), "sampler": Outer(Outer(s))},
    ),
    "batch sampler": lambda: (
        s := Order(),
        {
            "dataset": range(0, 900, 100),
            "batch_sampler": torch.utils.data.BatchSampler(Outer(s), 3, False),
        },
    ),
}
WORKERS = [
    {},
    pytest.param({"num_workers": 1, "persistent_workers": True}, marks=pytest.mark.slow),
]


def epochs_seen(loader):
    return sorted({int(each) // 100 for batch in loader for each in batch})


def loader_of(options, workers=None):
    sizes = {} if "batch_sampler" in options else {"batch_size": 3}
    return af.shard_loader(DataLoader(**options, **sizes, **(workers or {})), HERE)


@pytest.mark.parametrize("workers", WORKERS, ids=["here", "persistent"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_gets_the_number_of_the_pass_at_any_depth(kind, workers):
    _, options = KINDS[kind]()
    loader = loader_of(options, workers)
    assert [epochs_seen(loader) for _ in range(3)] == [[0], [1], [2]]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_that_the_loop_has_set_stays(kind):
    reader, options = KINDS[kind]()
    loader = loader_of(options)
    found = []
    for epoch in (7, 5, None, 6):
        if epoch is not None:
            reader.set_epoch(epoch)
        found += epochs_seen(loader)
    assert found == [7, 5, 2, 6]


def test_an_epoch_that_was_set_before_the_loader_stays_in_the_first_pass():
    data = Curriculum()
    data.set_epoch(4)
    loader = loader_of({"dataset": data})
    assert [epochs_seen(loader) for _ in range(2)] == [[4], [1]]


# -- ranks


def loop(state, loader, *, peeks=False):
    state, step = ours.built(af.wrap_ddp(), state)
    if peeks:
        next(iter(loader))
    for _ in range(2):
        for inputs, targets in loader:
            state, _ = step(state, (inputs, targets))
    return state


def rows(state, **options):
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randn(8, n, generator=generator).double() for n in (3, 1)]
    data = torch.utils.data.TensorDataset(*columns)
    return af.shard_loader(DataLoader(data, batch_size=4, shuffle=True, **options), state)


@pytest.mark.parametrize("recipe", [af.wrap_ddp(), af.wrap_fsdp(), af.reproducible(2)])
def test_ranks_in_other_passes_are_told_on_every_rank(recipe):
    def run(state):
        state, step = ours.built(recipe, state)
        loader = rows(state)
        if state.is_main:
            next(iter(loader))
        with pytest.raises(
            ValueError,
            match=re.escape(
                "step: ranks must go through the same passes of a loader together, got batch 0 of pass 1 on "
                "rank 0, batch 0 of pass 0 on rank 1; each iter(loader) is the next pass"
            ),
        ):
            step(state, tuple(next(iter(loader))))

    simulate(run, world_size=2)


def test_a_peek_on_every_rank_or_at_the_loader_that_was_split_is_right():
    def run(state):
        loader = rows(state)
        if state.is_main:
            next(iter(loader.loader))
        return loop(state, loader, peeks=True).step

    assert simulate(run, world_size=2) == [4, 4]


@pytest.mark.parametrize("in_extras", [False, True])
def test_a_loader_that_begins_anew_after_load_is_warned_of(in_extras, tmp_path):
    def start():
        state, step = ours.built(af.wrap_ddp(), HERE)
        loader = rows(state)
        return state, step, loader, {"loader": loader} if in_extras else {}

    state, step, loader, extras = start()
    for inputs, targets in loader:
        state, _ = step(state, (inputs, targets))
        af.save(step, state, tmp_path, extras=extras)
    state, step, loader, extras = start()
    state = af.load(step, state, tmp_path, extras=extras)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(loader.epoch, 2):
            for inputs, targets in loader:
                state, _ = step(state, (inputs, targets))
    texts = [str(each.message) for each in caught if "loader" in str(each.message)]
    assert len(texts) == (not in_extras)
    assert all("range(loader.epoch, num_epochs)" in text for text in texts)
    assert state.step == (4 if in_extras else 6)
