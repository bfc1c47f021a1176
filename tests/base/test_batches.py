"""Batches of every kind: counted, mapped and cut without loss."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

import accel_fn as af
from accel_fn.base.batch import map_tensors, split_batch, take_part

Pair = namedtuple("Pair", "inputs names")


@dataclass
class Sample:
    inputs: torch.Tensor
    label: torch.Tensor


pytree.register_dataclass(Sample)


def nested(n):
    """One of everything, with n samples."""
    return {
        "tuple": (torch.arange(n), torch.zeros(n, 2)),
        "named": Pair(torch.arange(n) * 2, [f"sample {i}" for i in range(n)]),
        "class": Sample(torch.arange(n) * 3, torch.zeros(n, 1, 1)),
        "ordered": OrderedDict(a=torch.arange(n) * 4),
        "list": [torch.arange(n), {"deep": torch.arange(n) * 5}],
        "scalar": torch.tensor(0.5),
        "text": "carried",
        "number": 7,
        "none": None,
        "other list": ["not", "one", "a", "sample", "of", "many", "words", "here"][
            : 8 if n != 8 else 7
        ],
        "empty": (),
    }


def flat(batch):
    return pytree.tree_leaves(batch)


@given(num_samples=st.integers(1, 12), num_parts=st.integers(1, 20))
def test_strings_as_torch_collates_them_go_with_their_samples(num_samples, num_parts):
    """One of a sample is a tuple, several beside each other are a list of tuples, in a dict it is a list."""
    several = (f"{num_samples}",) * (num_samples + 1)
    samples = [
        (torch.tensor(i), f"{i}", tuple(f"{i}" for _ in several), {"name": f"{i}"})
        for i in range(num_samples)
    ]
    for part in split_batch(default_collate(samples), num_parts):
        numbers, names, columns, deep = part
        expected = [str(number) for number in numbers.tolist()]
        for column in (names, *columns, deep["name"]):
            assert list(column) == expected
        assert (type(names), len(columns)) == (tuple, num_samples + 1)


@pytest.mark.parametrize(
    "items",
    [[1, 2, 3, 4], [None] * 4, [{"id": i} for i in range(4)], [["a"] * i for i in (1, 2, 3, 5)]],
    ids=["numbers", "nothing", "dicts", "words"],
)
def test_a_list_of_one_non_tensor_a_sample_is_cut_whatever_it_is(items):
    parts = split_batch((torch.arange(4), items), 2)
    assert [part[1] for part in parts] == [items[:2], items[2:]]


@pytest.mark.parametrize("settings", [(224, 224), (None, "text"), (["a"], ["b"])], ids=str)
def test_a_tuple_of_anything_but_texts_goes_to_every_part(settings):
    parts = split_batch({"inputs": torch.arange(2), "settings": settings}, 2)
    assert [part["settings"] for part in parts] == [settings, settings]


@pytest.mark.parametrize("num_samples", [2, 3])
def test_as_many_tuples_as_texts_in_each_and_samples_are_refused_where_they_are_cut(num_samples):
    """Torch's collate makes a tuple a field of it, one of a user's may make one a sample."""
    captions = [tuple(f"{i}-{j}" for j in range(num_samples)) for i in range(num_samples)]
    batch = (torch.arange(num_samples), captions)
    assert split_batch(batch, 1)[0][1] == captions
    with pytest.raises(ValueError, match=f"not be ambiguous, got a list of {num_samples}"):
        split_batch(batch, 2)


@pytest.mark.parametrize("num_samples", [2, 3])
def test_a_tuple_of_columns_is_not_taken_for_one(num_samples):
    names = [f"{i}" for i in range(num_samples)]
    parts = split_batch((torch.arange(num_samples), (names, names), (names, "all")), num_samples)
    assert [part[1:] for part in parts] == [(([n], [n]), ([n], "all")) for n in names]


@given(num_samples=st.integers(1, 12), num_parts=st.integers(1, 20))
def test_parts_join_to_the_batch_again(num_samples, num_parts):
    batch = nested(num_samples)
    parts = split_batch(batch, num_parts)
    sizes = [af.num_samples(part) for part in parts]
    assert len(parts) == min(num_parts, num_samples)
    assert max(sizes) - min(sizes) <= 1
    assert {type(part["named"]) for part in parts} == {Pair}
    assert {type(part["class"]) for part in parts} == {Sample}
    assert {type(part["ordered"]) for part in parts} == {OrderedDict}
    for pick in (
        lambda b: b["tuple"][0],
        lambda b: b["named"].inputs,
        lambda b: b["class"].inputs,
        lambda b: b["ordered"]["a"],
        lambda b: b["list"][1]["deep"],
    ):
        torch.testing.assert_close(torch.cat([pick(part) for part in parts]), pick(batch))
    assert [name for part in parts for name in part["named"].names] == batch["named"].names
    for part in parts:
        assert (part["text"], part["number"], part["none"]) == ("carried", 7, None)
        assert (part["empty"], part["other list"]) == ((), batch["other list"])
        assert part["scalar"] is batch["scalar"]


@given(num_samples=st.integers(0, 9), num_parts=st.integers(1, 12))
def test_ranks_take_consecutive_parts_that_may_be_empty(num_samples, num_parts):
    batch = (torch.arange(num_samples), torch.zeros(num_samples, 2))
    parts = [take_part(batch, index, num_parts) for index in range(num_parts)]
    assert torch.cat([part[0] for part in parts]).tolist() == list(range(num_samples))
    assert {part[1].shape[1:] for part in parts} == {(2,)}


def test_an_empty_batch_is_one_empty_part():
    (part,) = split_batch((torch.zeros(0, 3),), 4)
    assert part[0].shape == (0, 3)


def test_parts_are_views():
    whole = torch.zeros(4, 2)
    split_batch({"x": whole}, 2)[1]["x"].fill_(1.0)
    assert whole.sum(1).tolist() == [0, 0, 2, 2]


def test_mapping_reaches_every_tensor_and_nothing_else():
    batch = nested(3)
    mapped = map_tensors(lambda tensor: tensor + 1, batch)
    for old, new in zip(flat(batch), flat(mapped), strict=True):
        if isinstance(old, torch.Tensor):
            torch.testing.assert_close(new, old + 1)
        else:
            assert new is old


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(5, 2),
        (torch.zeros(5), torch.tensor(1)),
        [torch.zeros(5)],
        nested(5),
        Sample(torch.zeros(5), torch.zeros(5)),
    ],
)
def test_samples_are_counted_by_the_leading_dimension(batch):
    assert af.num_samples(batch) == 5


LABELS = torch.tensor([[1, -100, 3], [-100, -100, 0]])


@pytest.mark.parametrize(
    ("path", "batch"),
    [
        ("labels", {"labels": LABELS}),
        (1, (torch.zeros(2), LABELS)),
        (("target", 0), {"target": [LABELS]}),
        (("label",), Sample(torch.zeros(2), LABELS)),
        ("names", Pair(torch.zeros(2), LABELS)),
    ],
)
def test_labels_are_counted_wherever_they_are(path, batch):
    count = af.num_labels(path)(batch)
    assert (count, type(count)) == (3, int)


def test_the_ignored_label_is_the_users():
    assert af.num_labels("y", ignore_index=0)({"y": torch.tensor([0, 1, 0, 2])}) == 2


def test_counts_beyond_float32_are_exact():
    """A weight of 2**24 + 1 is not a float32: weights travel as float64."""
    from accel_fn.testing import simulate

    def run(state):
        model = torch.nn.Linear(1, 1)
        plan = af.Plan(
            lambda model, batch: model(batch).mean(),
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            weight_fn=lambda batch: 2**24 + 1 - state.rank,
        )
        state, step = af.build(state, af.wrap_ddp()(plan))
        return step(state, torch.ones(1, 1))[1].weight

    assert simulate(run, world_size=2) == [2**25 + 1, 2**25 + 1]
