"""A batch that is read in one call equals the batch of torch's DataLoader."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from accel_fn.data.fetch import Fetcher, has_rows
from tests.support import strategies as ours

SIZE = 12


def numbers(*shape, dtype=torch.float32):
    return torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)


def memory_mapped(folder):
    path = folder / "rows.npy"
    np.save(path, numbers(SIZE, 3, dtype=torch.float16).numpy())
    return np.load(path, mmap_mode="r")


class Samples(Dataset):
    """A data set that is indexed one sample at a time."""

    def __init__(self, sample_of, size=SIZE):
        self.sample_of, self.size = sample_of, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.sample_of(index)


class Batches(Samples):
    """A data set with `__getitems__`, torch's protocol for many samples in one call."""

    def __getitem__(self, index):
        raise AssertionError("a sample was asked for alone")

    def __getitems__(self, indices):
        return [self.sample_of(index) for index in indices]


class Augmented(TensorDataset):
    """A subclass with its own indexing."""

    def __getitem__(self, index):
        return tuple(-tensor for tensor in super().__getitem__(index))


TENSORS = TensorDataset(
    numbers(SIZE, 2, 3), torch.arange(SIZE), torch.arange(SIZE) % 2 == 0, torch.zeros(SIZE, 0)
)
AT_ONCE = {
    "tensors": TENSORS,
    "a tensor": numbers(SIZE, 4, dtype=torch.bfloat16),
    "channels last": torch.randn(SIZE, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": numbers(1, 3).expand(SIZE, 3),
    "an array": numbers(SIZE, 2, dtype=torch.float64).numpy(),
    "numbers in an array": np.arange(SIZE, dtype=np.uint16),
    "subset by list": Subset(TENSORS, [5, 1, 1, 9, 11, 0, 3, 4, 4, 7, 8, 2]),
    "subset by tensor": Subset(TENSORS, torch.arange(SIZE).flip(0)),
    "subset by array": Subset(numbers(SIZE, 4), np.arange(SIZE)[::-1]),
    "subset by range": Subset(TENSORS, range(SIZE)),
    "subset of a subset": Subset(Subset(TENSORS, list(range(SIZE))[::-1]), [3] * 6 + [1] * 6),
    "stack": StackDataset(numbers(SIZE, 3).numpy(), torch.arange(SIZE)),
    "named stack": StackDataset(
        images=TENSORS, labels=Subset(torch.arange(SIZE), list(range(SIZE)))
    ),
}
ONE_BY_ONE = {
    "a list": [float(index) for index in range(SIZE)],
    "dictionaries": Samples(lambda index: {"x": torch.full((2,), index), "name": str(index)}),
    "many at once": Batches(lambda index: (index, [index, 0.5])),
    "subset of many at once": Subset(Batches(lambda index: index), list(range(SIZE))[::-1]),
    "own indexing": Augmented(*TENSORS.tensors[:2]),
    "joined": ConcatDataset([TENSORS, TENSORS]),
    "subset from the end": Subset(TENSORS, list(range(-SIZE, 0))),
    "a parameter": torch.nn.Parameter(numbers(SIZE, 2)),
}


def assert_same(actual, expected):
    """Assert equal values, dtypes, strides, types and structure."""
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        assert actual.stride() == expected.stride()
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            assert_same(actual[key], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert actual == expected


def by_torch(dataset, batches, collate_fn=None):
    return list(DataLoader(dataset, batch_sampler=batches, collate_fn=collate_fn))


@pytest.mark.parametrize("name", [*AT_ONCE, *ONE_BY_ONE])
@ours.share(0.3)
@given(
    batches=st.lists(st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=5), max_size=3),
)
def test_a_batch_is_what_torch_makes_of_the_samples(name, batches):
    dataset = {**AT_ONCE, **ONE_BY_ONE}[name]
    fetcher = Fetcher(dataset, default_collate)
    expected = by_torch(dataset, batches)
    assert_same([fetcher.fetch(batch) for batch in batches], expected)
    assert_same([fetcher.fetch(torch.tensor(batch)) for batch in batches], expected)


def test_a_memory_mapped_array_is_read_at_once(tmp_path):
    rows = memory_mapped(tmp_path)
    assert has_rows(rows)
    assert_same(Fetcher(rows, default_collate).fetch([3, 0]), torch.from_numpy(rows[[3, 0]]))


class Calls(torch.overrides.TorchFunctionMode):
    """Counts the calls of torch's functions."""

    number = 0

    def __torch_function__(self, fn, types, args=(), kwargs=None):
        self.number += 1
        return fn(*args, **(kwargs or {}))


def num_calls(dataset, num_samples):
    with Calls() as calls:
        Fetcher(dataset, default_collate).fetch(list(range(num_samples)))
    return calls.number


@pytest.mark.parametrize("dataset", AT_ONCE.values(), ids=AT_ONCE)
def test_what_can_be_indexed_by_many_is_read_at_once(dataset):
    """It takes as many calls of torch for many samples as for two."""
    assert has_rows(dataset)
    assert num_calls(dataset, 8) == num_calls(dataset, 2)


@pytest.mark.parametrize(
    "dataset",
    [
        np.array(["a", "b"]),
        np.arange(4, dtype=">f4"),
        np.array(0.5),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        torch.tensor(1.0),
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(2)], layout=torch.jagged),
    ],
    ids=["text", "big-endian", "no dimension", "masked", "number", "sparse", "nested"],
)
def test_what_torch_would_not_stack_alike_is_no_rows(dataset):
    assert not has_rows(dataset)


@pytest.mark.parametrize("index", [-1, -SIZE])
def test_places_from_the_end_are_places(index):
    assert_same(
        Fetcher(TENSORS, default_collate).fetch([0, index]), by_torch(TENSORS, [[0, index]])[0]
    )


@pytest.mark.parametrize("dataset", [TENSORS, np.ones((SIZE, 2)), Subset(TENSORS, [0, 1, 99])])
def test_a_place_that_is_none_names_itself(dataset):
    wrong = 2 if isinstance(dataset, Subset) else 40
    with pytest.raises(IndexError) as caught:
        Fetcher(dataset, default_collate).fetch([0, wrong, 1])
    assert caught.value.__notes__ == [f"shard_loader: the data set failed to give sample {wrong}"]


def test_samples_that_cannot_be_collated_are_named():
    data = Samples(lambda index: torch.zeros(index))
    with pytest.raises(RuntimeError) as caught:
        Fetcher(data, default_collate).fetch([3, 4])
    assert caught.value.__notes__ == ["shard_loader: collate_fn failed on samples 3, 4"]


@pytest.mark.parametrize("name", ["a tensor", "an array", "expanded"])
def test_a_batch_is_no_view_of_the_data(name):
    dataset = AT_ONCE[name]
    before = torch.as_tensor(dataset).clone()
    batch = Fetcher(dataset, default_collate).fetch(list(range(SIZE)))
    batch.fill_(-1)
    torch.testing.assert_close(torch.as_tensor(dataset), before, rtol=0, atol=0)


def test_types_that_collating_was_taught_are_collated_by_it():
    def doubled(batch, *, collate_fn_map=None):
        return 2 * torch.stack(batch)

    taught = default_collate_fn_map[torch.Tensor]
    default_collate_fn_map[torch.Tensor] = doubled
    try:
        batch = Fetcher(TENSORS, default_collate).fetch([3])
        assert_same(batch, by_torch(TENSORS, [[3]])[0])
        assert batch[1].tolist() == [6]
    finally:
        default_collate_fn_map[torch.Tensor] = taught
    assert Fetcher(TENSORS, default_collate).fetch([3])[1].tolist() == [3]
