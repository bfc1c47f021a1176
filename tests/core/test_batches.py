"""Batches of every kind are counted, mapped and cut without loss."""

from collections import ChainMap, OrderedDict, UserDict, namedtuple
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

import accel_fn as af
from accel_fn.core.split_batch import split_batch
from accel_fn.errors import BatchError
from accel_fn.testing import simulate
from tests.support import strategies as ours

META = af.DistState(device="meta")
Pair = namedtuple("Pair", "inputs names")


@dataclass
class Sample:
    inputs: torch.Tensor
    label: torch.Tensor


pytree.register_dataclass(Sample)


def nested(n):
    """Make a batch that nests every supported type, with n samples."""
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
        "rows of numbers": [[0.5] * (n + 1)],
        "empty": (),
    }


@given(num_samples=st.integers(1, 12), num_parts=st.integers(1, 20))
def test_strings_as_torch_collates_them_go_with_their_samples(num_samples, num_parts):
    """Torch collates one string per sample to a tuple, several to a list of tuples, those of dicts
    to a list."""
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
    [[None] * 4, [{"id": i} for i in range(4)], [["a"] * i for i in (1, 2, 3, 5)]],
    ids=["nothing", "dicts", "words"],
)
def test_a_list_of_one_non_tensor_a_sample_is_cut_whatever_it_is(items):
    parts = split_batch((torch.arange(4), items), 2)
    assert [part[1] for part in parts] == [items[:2], items[2:]]


@pytest.mark.parametrize(
    "settings", [(224, 224, 3), (None, "text"), (["a"], ["b"]), ["one"], range(9)], ids=str
)
def test_settings_go_to_every_part(settings):
    parts = split_batch({"inputs": torch.arange(4), "settings": settings}, 2)
    assert [part["settings"] for part in parts] == [settings, settings]


def test_rows_of_several_numbers_stay_together_where_nothing_is_cut():
    batch = (torch.zeros(4), torch.zeros(6))
    assert split_batch(batch, 1) == [batch]
    with pytest.raises(BatchError, match="hold tensors of one leading dimension"):
        split_batch(batch, 2)


def test_as_many_tuples_as_texts_in_each_and_samples_are_refused_where_they_are_cut():
    """Torch's collate makes each tuple a field; a user's own collate may make each one a sample."""
    captions = [tuple(f"{i}-{j}" for j in range(3)) for i in range(3)]
    batch = (torch.arange(3), captions)
    assert split_batch(batch, 1)[0][1] == captions
    with pytest.raises(ValueError, match="not be ambiguous, got a list of 3"):
        split_batch(batch, 2)


def test_a_tuple_of_columns_is_not_taken_for_one():
    names = ["0", "1"]
    parts = split_batch((torch.arange(2), (names, names), (names, "all")), 2)
    assert [part[1:] for part in parts] == [(([n], [n]), ([n], "all")) for n in names]


@given(num_samples=st.integers(1, 12), num_parts=st.integers(1, 20))
def test_parts_join_to_the_batch_again(num_samples, num_parts):
    batch = nested(num_samples)
    parts = split_batch(batch, num_parts)
    sizes = [af.count_samples(part) for part in parts]
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
        assert (part["empty"], part["rows of numbers"]) == ((), batch["rows of numbers"])
        assert part["scalar"] is batch["scalar"]


def test_an_empty_batch_is_one_empty_part():
    (part,) = split_batch((torch.zeros(0, 3),), 4)
    assert part[0].shape == (0, 3)


class Unknown:
    """A class that torch's pytree does not know."""

    def __init__(self, inputs):
        self.inputs = inputs


class Slotted:
    __slots__ = ("inputs",)

    def __init__(self, inputs):
        self.inputs = inputs


@pytest.mark.parametrize(
    ("beside", "text"),
    [
        ([0.1, 0.2, 0.3, 0.4], "as many numbers as samples in a list or tuple, got 4 items"),
        ((1, 2, 3, 4), "got 4 items beside 4 samples; make numbers of samples a tensor"),
        (["cat", "dog"], "of one item a sample, got 2 items beside 4 samples; keep settings in a"),
        ([{"id": 1}, {"id": 2}], "got 2 items beside 4 samples"),
        (("cat", "dog"), "got 2 items beside 4 samples"),
        (range(4), "containers that torch's pytree knows, got a range of length 4"),
        (np.zeros(3), "got a ndarray of length 3"),
        (Unknown(torch.zeros(4)), "got a Unknown that holds tensors; make it a tensor, a dict"),
        (Unknown([{"deep": Unknown(torch.zeros(4))}]), "got a Unknown that holds tensors"),
        (Slotted(torch.zeros(4)), "got a Slotted that holds tensors"),
        (torch.distributions.Normal(torch.zeros(4), 1.0), "got a Normal that holds tensors"),
        (torch.eye(4).to_sparse(), "hold dense tensors where it is cut, got a sparse_coo one"),
        (
            torch.nested.nested_tensor([torch.ones(1)] * 4, layout=torch.jagged),
            "got a nested one; give accumulate a split",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_what_may_hold_rows_is_refused_where_a_batch_is_cut(beside, text):
    batch = (torch.zeros(4), {"beside": beside})
    assert split_batch(batch, 1)[0] is batch
    with pytest.raises(BatchError, match=f"^step: batch must .*{text}"):
        split_batch(batch, 2)


@pytest.mark.parametrize(
    "beside",
    [Unknown("text"), Unknown(torch.tensor(0.5)), torch.nn.Linear(4, 4), torch.float32, Unknown],
    ids=lambda each: str(each)[:20],
)
def test_objects_without_rows_go_to_every_part(beside):
    assert [part[1] for part in split_batch((torch.zeros(4), beside), 2)] == [beside] * 2


def test_arrays_of_numpy_are_cut_as_tensors_are():
    array = np.arange(8).reshape(4, 2)
    parts = split_batch({"x": torch.zeros(4), "array": array}, 3)
    assert [part["array"].tolist() for part in parts] == [array[:2].tolist(), [[4, 5]], [[6, 7]]]
    parts[0]["array"][0, 0] = 9
    assert array[0, 0] == 9


class Lazy(UserDict):
    """A mapping with an attribute beside its items, like transformers' `BatchEncoding`."""

    def __init__(self, items, source=None):
        super().__init__(items)
        self.source = source


class Named(dict):
    """A dict with an attribute."""

    source = None


class Frozen(Mapping):
    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Sharing(Frozen, MutableMapping):
    """A mapping whose copies share their items."""

    def __setitem__(self, key, value):
        self._items[key] = value

    def __delitem__(self, key):
        del self._items[key]


class Rounding(Sharing):
    """A mapping that changes the values that are put into it."""

    def __copy__(self):
        return type(self)(self._items)

    def __setitem__(self, key, value):
        self._items[key] = value * 1


MAPPINGS = [Lazy, Named, Frozen, MappingProxyType, ChainMap, OrderedDict]


@pytest.mark.parametrize("kind", MAPPINGS)
@given(num_samples=st.integers(1, 9), num_parts=st.integers(1, 5))
def test_any_mapping_is_cut_and_mapped_in_its_own_class(kind, num_samples, num_parts):
    mapping = kind({"x": torch.arange(num_samples), "deep": kind({"y": torch.ones(num_samples)})})
    if kind in (Lazy, Named):
        mapping.source = "a file"
    assert af.count_samples((mapping,)) == num_samples
    for made in (*split_batch((mapping,), num_parts), af.extend.to_device((mapping,), META)):
        assert (type(made[0]), type(made[0]["deep"])) == (kind, kind)
        assert getattr(made[0], "source", None) == getattr(mapping, "source", None)
    joined = torch.cat([part["x"] for (part,) in split_batch((mapping,), num_parts)])
    assert joined.tolist() == mapping["x"].tolist() == list(range(num_samples))


@pytest.mark.parametrize("kind", [Sharing, Rounding])
def test_a_mapping_of_which_no_copy_can_be_made_is_refused_and_left_as_it_was(kind):
    x = torch.arange(4)
    mapping = kind({"x": x})
    with pytest.raises(BatchError, match=f"whose copies take other values, got {kind.__name__}; r"):
        split_batch(mapping, 2)
    assert mapping["x"] is x
    assert af.count_samples(mapping) == 4


def test_parts_are_views():
    whole = torch.zeros(4, 2)
    split_batch({"x": whole}, 2)[1]["x"].fill_(1.0)
    assert whole.sum(1).tolist() == [0, 0, 2, 2]


def test_to_device_reaches_every_tensor_and_nothing_else():
    batch = nested(3)
    moved = af.extend.to_device(batch, META)
    for old, new in zip(pytree.tree_leaves(batch), pytree.tree_leaves(moved), strict=True):
        if isinstance(old, torch.Tensor):
            assert (new.device.type, new.shape, new.dtype) == ("meta", old.shape, old.dtype)
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
    assert af.count_samples(batch) == 5


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
    count = af.count_labels(path)(batch)
    assert (count, type(count)) == (3, int)


def test_the_ignored_label_is_the_users():
    assert af.count_labels("y", ignore_index=0)({"y": torch.tensor([0, 1, 0, 2])}) == 2


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array])
def test_labels_are_weighed_by_their_classes(kind):
    weight_fn = af.count_labels("y", class_weight=kind([0.5, 0.0, 0.1, 7.0]))
    assert weight_fn({"y": LABELS}) == pytest.approx(7.5, rel=1e-15)
    assert weight_fn({"y": LABELS.to(torch.int16)[:, :2]}) == 0.0
    assert weight_fn({"y": torch.tensor([True, False])}) == 0.5


def test_later_writes_to_class_weights_change_nothing():
    given = torch.ones(4, dtype=torch.float64)
    weight_fn = af.count_labels("y", class_weight=given)
    given.zero_()
    assert weight_fn({"y": LABELS}) == 3.0


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (
            torch.tensor([0, 2, -100]),
            "count_labels: labels must be in 0 .. 1, since class_weight has 2 weights, got 2; "
            "give every class a weight, or leave the label out by ignore_index",
        ),
        (torch.tensor([0, -1]), "must be in 0 .. 1, since class_weight has 2 weights, got -1"),
        (torch.ones(2), r"lead to integer labels with class_weight, got torch.float32"),
    ],
)
def test_a_label_that_has_no_weight_is_refused(labels, text):
    with pytest.raises(BatchError, match=text):
        af.count_labels("y", class_weight=[1, 2])({"y": labels})


def test_class_weights_print_in_a_plan_and_many_are_told_apart_by_their_checksum():
    def shown(weights):
        return repr(ours.plan(weight_fn=af.count_labels("y", class_weight=weights)))

    assert "ignore_index=-100, class_weight=[1.0, 2.5])" in shown([1, 2.5])
    many = [shown([value] * 1000) for value in (1, 1, 2)]
    assert many[0] == many[1] != many[2]
    assert "class_weight=<1000 weights of checksum " in many[0]


def test_counts_beyond_float32_are_exact():
    """2**24 + 1 is no float32, so weights travel as float64."""

    def run(state):
        model = torch.nn.Linear(1, 1)
        plan = af.Plan(
            lambda model, batch: model(batch).mean(),
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            weight_fn=lambda batch: 2**24 + 1 - state.rank,
        )
        state, step = af.build(af.wrap_ddp()(plan), state)
        return step(state, torch.ones(1, 1))[1].weight

    assert simulate(run, world_size=2) == [2**25 + 1, 2**25 + 1]
