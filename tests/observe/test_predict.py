"""predict: the tree that it returns, what it leaves as it was, and what it refuses, on every rank alike."""

from collections import UserDict, namedtuple
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import accel_fn as af
from accel_fn.testing import simulate
from tests.observe.test_evaluate import Talking

DATA = TensorDataset(torch.arange(10.0).unsqueeze(1))
Found = namedtuple("Found", ["rows", "texts"])


def loss_fn(model, batch):
    return model(batch[0]).mean()


def make(state, *transforms, model=None):
    model = nn.Linear(1, 1) if model is None else model
    plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))
    state, step = af.build(af.compose(af.wrap_ddp(), *transforms)(plan), state)
    return state, step, af.shard_loader(DataLoader(DATA, batch_size=4), state)


def rows(model, batch):
    return batch[0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_tree_keeps_its_structure_and_its_dtypes(world_size):
    def fn(model, batch):
        (column,) = batch
        texts = [str(int(each)) for each in column]
        ragged = [torch.arange(int(each)) for each in column]
        return Found({"half": column.half(), "flag": column > 3}, (texts, af.samples(ragged)))

    def run(state):
        state, step, loader = make(state, af.accumulate(2))
        found = af.predict(step, state, loader, fn)
        (texts, ragged), held = found.texts, found.rows
        assert type(found) is Found
        assert texts == [str(each) for each in range(10)]
        assert [len(each) for each in ragged] == [*range(10)]
        assert held["half"].dtype == torch.float16
        assert torch.equal(held["half"].squeeze(1), torch.arange(10.0).half())
        assert torch.equal(held["flag"].squeeze(1), torch.arange(10) > 3)

    simulate(run, world_size=world_size)


def test_a_mapping_of_a_class_that_pytree_does_not_know_is_joined_over_batches():
    state, step, loader = make(af.DistState())
    found = af.predict(step, state, loader, lambda model, batch: UserDict(rows=batch[0]))
    assert type(found) is UserDict
    assert torch.equal(found["rows"], DATA.tensors[0])


def test_rows_that_are_views_keep_nothing_else_in_memory():
    state, step, loader = make(af.DistState())
    found = af.predict(step, state, loader, lambda model, batch: [*batch[0].expand(-1, 999)[:, :1]])
    assert {each.untyped_storage().nbytes() for each in found} == {4}


def test_a_buffer_that_is_written_again_is_copied():
    buffer = torch.zeros(2, 1)
    state, step, _ = make(af.DistState())
    batches = [(torch.full((2, 1), float(number)),) for number in range(3)]
    found = af.predict(step, state, batches, lambda model, batch: buffer.copy_(batch[0]))
    assert found.squeeze(1).tolist() == [0, 0, 1, 1, 2, 2]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


@pytest.mark.parametrize(
    ("wrap", "world_size"),
    [
        (lambda loader, state: af.group_batches(loader, 1), 1),
        (lambda loader, state: af.group_batches(loader, 2), 2),
        (lambda loader, state: af.prefetch(af.group_batches(loader, 2), state), 3),
    ],
)
def test_rows_of_a_stream_come_as_they_are_read(wrap, world_size):
    def run(state):
        state, step, _ = make(state, af.accumulate(2, split=None))
        loader = af.shard_loader(DataLoader(Stream(), batch_size=4), state)
        return af.predict(step, state, wrap(loader, state), rows).squeeze(1).tolist()

    assert simulate(run, world_size=world_size) == [[*range(10)]] * world_size


def test_windows_know_their_samples():
    def run(state):
        state, step, _ = make(state, af.accumulate(2, split=None))
        loader = DataLoader(DATA, batch_size=4, shuffle=True)
        loader = af.group_batches(af.shard_loader(loader, state), 2)
        return af.predict(step, state, loader, rows).squeeze(1).tolist()

    assert simulate(run, world_size=2) == [[*range(10)]] * 2


def test_the_rest_of_an_epoch_has_the_rest_of_the_samples():
    def run(state):
        state, step, loader = make(state)
        (rest,) = loader.epochs(1, since=af.DistState(step=1))
        return af.predict(step, state, rest, rows).squeeze(1).tolist()

    assert simulate(run, world_size=2) == [[4, 5, 6, 7, 8, 9]] * 2


class Named(Dataset):
    """A data set whose samples have names in place of numbers."""

    def __getitem__(self, name):
        return torch.tensor([float(ord(name))])


def test_samples_without_numbers_come_as_they_are_read():
    def run(state):
        state, step, _ = make(state)
        loader = af.shard_loader(DataLoader(Named(), batch_size=2, sampler=[*"cab"]), state)
        return af.predict(step, state, loader, lambda model, batch: batch).squeeze(1).tolist()

    assert simulate(run, world_size=2) == [[*map(ord, "cab")]] * 2


def refused(fn, text, *, loader=None, error=ValueError, world_size=2):
    def run(state):
        state, step, own = make(state)
        with pytest.raises((error, RuntimeError), match=text):
            af.predict(step, state, own if loader is None else loader(state), fn)

    for size in (1, world_size):
        simulate(run, world_size=size)


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (
            lambda model, batch: batch[0][:1],
            "one row for each of 4 samples, got 1 rows; where colla",
        ),
        (
            lambda model, batch: batch[0].mean(),
            r"return tensors \[num_rows, ...\] and lists of num_rows items, got a 0-dim tensor; a fig",
        ),
        (
            lambda model, batch: {"a": "text"},
            "items, got a str; a figure of the whole loader is what",
        ),
        (lambda model, batch: {}, r"tensors and lists of one length, got lengths \[\]"),
        (
            lambda model, batch: (batch[0], [1]),
            r"tensors and lists of one length, got lengths \[4, 1\]",
        ),
    ],
)
def test_what_is_not_a_row_a_sample_is_refused(fn, text):
    refused(fn, f"predict: fn must .*{text}", world_size=1)


def test_samples_that_collate_fn_leaves_out_are_refused_and_may_be_read_without_numbers():
    def make_loader(state):
        def readable(items):
            return af.samples(item[0] if int(item[0]) % 3 else None for item in items)

        return af.shard_loader(DataLoader(DATA, batch_size=4, collate_fn=readable), state)

    def fn(model, batch):
        return torch.stack(batch)

    refused(fn, r"for each of \d samples, got .*; where .*give iter\(loader\)", loader=make_loader)

    def run(state):
        state, step, _ = make(state)
        found = af.predict(step, state, iter(make_loader(state)), fn)
        return found.squeeze(1).tolist()

    assert simulate(run, world_size=2) == [[1, 2, 4, 5, 7, 8]] * 2


def test_rows_of_several_lengths_are_a_list():
    def wide(model, batch):
        return batch[0].expand(-1, 1 + int(batch[0].max()))

    refused(
        wide,
        r"fn must return one form of tree for every batch, torch.float32 \[rows, 4\] before, got "
        r"torch.float32 \[rows, 8\]; make rows of several lengths a list: list\(tensor\)",
        world_size=1,
    )

    def run(state):
        state, step, loader = make(state)
        found = af.predict(step, state, loader, lambda model, batch: list(wide(model, batch)))
        return [float(each[0]) for each in found]

    assert simulate(run, world_size=2) == [[*range(10)]] * 2


def test_trees_that_differ_are_refused():
    refused(
        lambda model, batch: {str(int(batch[0].max())): batch[0]},
        r"for every batch, {'3': 'torch.float32 \[rows, 1\]'} before, got {'7': 'torch.float32",
        world_size=1,
    )

    def run(state):
        state, step, loader = make(state)
        for fn, got in (
            (lambda model, batch: {str(state.rank): batch[0]}, "{'1': 'torch.float32"),
            (
                lambda model, batch: batch[0].expand(-1, 1 + state.rank),
                r"torch.float32 \[rows, 2\]",
            ),
        ):
            text = f"predict: fn must return one form of tree on every rank, got {got}.* on rank 1 and "
            with pytest.raises(ValueError, match=text):
                af.predict(step, state, loader, fn)

    simulate(run, world_size=2)


def test_items_that_cannot_be_sent_are_refused_on_one_rank_too():
    text = "predict: fn's tree must hold items that can be pickled"
    refused(lambda model, batch: [lambda: 0 for _ in batch[0]], text)


@pytest.mark.parametrize("batches", [[], [None], [(torch.zeros(0, 1),)]])
def test_a_loader_without_a_sample_is_refused(batches):
    text = "predict: loader must give a sample, got 'none'; an iterator gives its batches only once"
    refused(rows, text, loader=lambda state: batches)


def test_arguments_of_another_kind_are_refused():
    refused("rows", "predict: fn must be a function", error=TypeError)
    refused(
        rows, "predict: loader must be a loader, or any", loader=lambda state: 3, error=TypeError
    )
    state, _, loader = make(af.DistState())
    with pytest.raises(
        TypeError, match="predict: step must be what build gave, got 'ShardedLoader'"
    ):
        af.predict(loader, state, loader, rows)


@pytest.mark.parametrize(
    "wrap",
    [lambda loader, state: loader, af.prefetch, lambda loader, state: af.group_batches(loader, 1)],
)
@pytest.mark.parametrize("function", [af.predict, af.evaluate])
def test_a_loader_that_every_rank_would_read_whole_is_refused(function, wrap):
    def run(state):
        state, step, _ = make(state, af.accumulate(2, split=None))
        loader = wrap(DataLoader(DATA, batch_size=4), state)
        text = (
            f"{function.__name__}: loader must be shared out over 2 ranks, got 'DataLoader'; give"
        )
        with pytest.raises(ValueError, match=text):
            function(step, state, loader, rows)

    simulate(run, world_size=2)


@pytest.mark.parametrize("function", [af.predict, af.evaluate])
def test_batches_that_no_rank_has_cut_are_warned_of(function):
    def fn(model, batch):
        return {"x": batch[0]}

    def run(state):
        state, step, loader = make(state)
        function(step, state, loader, fn)
        function(step, state, [af.shard_batch((torch.arange(8.0).view(8, 1),), state)], fn)
        text = f"{function.__name__}: batch should be this rank's part of the global batch, got the"
        with pytest.warns(UserWarning, match=text) if state.is_main else nullcontext() as found:
            function(step, state, [(torch.ones(4, 1),)], fn)
        return found

    (warning,), other = simulate(run, world_size=2)
    assert other is None
    assert warning.filename == __file__


@pytest.mark.parametrize(
    ("function", "data"), [(af.predict, DATA), (af.evaluate, Stream()), (af.evaluate, Talking())]
)
def test_a_failure_on_one_rank_is_raised_on_all(function, data):
    def run(state):
        state, step, _ = make(state)
        loader = af.shard_loader(DataLoader(data, batch_size=4), state)

        def fn(model, batch):
            if state.rank == 1:
                raise OSError("gone")
            return {"x": batch[0]}

        with pytest.raises((OSError, RuntimeError)) as caught:
            function(step, state, loader, fn)
        return str(caught.value)

    first, second = simulate(run, world_size=2)
    assert second == "gone"
    assert f"{function.__name__}: failed on rank 1: OSError('gone')" in first


def make_sharded(state, *transforms, data=DATA, k=2):
    model = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))
    for each in model.parameters():
        nn.init.constant_(each, 0.1)
    plan = af.Plan(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1))
    recipe = af.compose(af.wrap_fsdp(), af.accumulate(k), *transforms)
    state, step = af.build(recipe(plan), state)
    return state, step, af.shard_loader(DataLoader(data, batch_size=4), state)


@pytest.mark.parametrize(
    ("function", "is_late", "is_first", "k", "data"),
    [(af.predict, True, True, 2, DATA), (af.evaluate, False, False, 1, Talking())],
)
def test_with_shards_a_failure_on_one_rank_ends_all_and_can_be_followed(
    function, is_late, is_first, k, data
):
    """The others gather shards in the forward that this rank leaves."""

    def run(state):
        state, step, loader = make_sharded(state, data=data, k=k)

        def fn(model, batch, fails=True):
            if state.rank == 1 and fails and not is_late:
                raise OSError("gone")
            outputs = model(batch[0]).squeeze(1)
            if state.rank == 1 and fails and is_late:
                raise OSError("gone")
            return {"x": outputs}

        whole = lambda model, batch: fn(model, batch, fails=False)
        if not is_first:
            function(step, state, loader, whole)
        with pytest.raises((OSError, RuntimeError, ValueError)) as caught:
            function(step, state, loader, fn)
        function(step, state, loader, whole)
        step(state, next(iter(loader)))
        return str(caught.value)

    first, second = simulate(run, world_size=2)
    assert second == "gone"
    text = f"{function.__name__}: failed on rank 1: OSError"
    assert text in first or "FSDP units in the same order, got the end as" in first


@pytest.mark.parametrize(
    ("function", "metric_fn"),
    [
        (af.evaluate, None),
        (af.evaluate, lambda model, batch: {"x": model(batch[0]).squeeze(1)}),
        (af.predict, rows),
    ],
)
def test_with_shards_a_batch_that_cannot_be_cut_or_read_ends_all(function, metric_fn):
    def batches(state, fails_at_reading):
        yield (torch.ones(4, 1) * state.rank,)
        if state.rank == 1 and fails_at_reading:
            raise OSError("gone")
        yield (torch.ones(4, 1), *([torch.ones(3)] if state.rank == 1 else []))

    def run(state):
        state, step, _ = make_sharded(state)
        for fails_at_reading, text in ((True, "gone"), (False, "tensors of one leading dimension")):
            with pytest.raises((OSError, ValueError, RuntimeError), match=text):
                function(step, state, batches(state, fails_at_reading), metric_fn)
        function(step, state, [(torch.ones(2, 1) * state.rank,)], metric_fn)

    simulate(run, world_size=2)


def test_another_number_of_rows_on_one_rank_is_refused_on_all_with_fsdp():
    def run(state):
        state, step, loader = make_sharded(state)

        def fn(model, batch):
            return model(batch[0])[state.rank :]

        with pytest.raises((ValueError, RuntimeError)) as caught:
            af.predict(step, state, loader, fn)
        return str(caught.value), len(af.predict(step, state, loader, rows))

    (first, num), (second, _) = simulate(run, world_size=2)
    assert "one row for each of 2 samples, got 0 rows" in second
    assert "predict: failed on rank 1" in first
    assert num == 10
