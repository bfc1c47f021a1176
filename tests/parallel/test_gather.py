"""gather: rows and structure, the same result on every rank, with types, dtypes and devices
kept."""

import dataclasses
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

import accel_fn as af
from accel_fn.testing import simulate, strategies

Boxes = namedtuple("Boxes", "corners names")
ALONE = af.DistState()


@dataclasses.dataclass
class Found:
    """Detections in one image, a class that torch's pytree does not know."""

    boxes: torch.Tensor
    label: str


@dataclasses.dataclass
class Output:
    """A model's output for a batch, a class that torch's pytree knows."""

    scores: torch.Tensor
    names: list[str]


pytree.register_dataclass(Output)


class Angles(torch.Tensor):
    """A tensor subclass with a unit."""


def boxes(count, start=0):
    return torch.arange(start, start + 4 * count).reshape(count, 4).float()


def assert_same(found, expected):
    """Assert the same types and values, tensors to the bit."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_same(list(found.values()), list(expected.values()))
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert_same(mine, theirs)
    elif dataclasses.is_dataclass(expected):
        assert_same(vars(found), vars(expected))
    else:
        assert found == expected


KINDS = [torch.float32, torch.float64, torch.int64, torch.int16, torch.bool, torch.complex64]
KINDS += [torch.bfloat16, torch.uint8]


@st.composite
def columns(draw, num_rows):
    """Draw a tensor [num_rows, ...] of some dtype."""
    shape = (num_rows, *draw(st.lists(st.integers(0, 3), max_size=2)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    return torch.randint(0, 2, shape, generator=generator).to(draw(st.sampled_from(KINDS)))


@st.composite
def items(draw, num_rows):
    """Draw a list, marked or not, with one item per sample, of any size."""
    counts = draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows))
    make = draw(
        st.sampled_from(
            [
                lambda count: {"boxes": boxes(count), "labels": torch.arange(count)},
                lambda count: Boxes(boxes(count).double(), [str(count)] * count),
                lambda count: (torch.tensor(count), boxes(count)[::2]),
                lambda count: Found(boxes(count), "cat" * count),
                lambda count: {"masks": [boxes(each) for each in range(count)], "none": None},
                lambda count: "word" * count,
                lambda count: [count] * count,
            ]
        )
    )
    return draw(st.sampled_from([list, af.samples]))(make(count) for count in counts)


def structures(rows, leaves):
    return st.one_of(
        st.builds(lambda first, others: (first, *others), rows, st.lists(leaves, max_size=2)),
        st.dictionaries(st.sampled_from("abc"), leaves, min_size=1, max_size=3),
        st.builds(Boxes, leaves, leaves),
        st.builds(Output, leaves, leaves),
    )


@st.composite
def dealt_trees(draw):
    """Draw a tree and the parts of it that ranks hold; some parts may be empty."""
    num_rows = draw(st.integers(0, 8))
    rows = st.one_of(columns(num_rows), items(num_rows))
    tree = draw(st.one_of(rows, structures(rows, st.one_of(rows, structures(rows, rows)))))
    sizes = draw(strategies.uneven_parts(num_rows, draw(st.integers(1, 4))))
    return tree, sizes


def part_of(node: Any, start: int, stop: int) -> Any:
    """Return rows of a tree in which every list holds rows."""
    if isinstance(node, torch.Tensor | list):
        return node[start:stop]
    if isinstance(node, dict):
        return {name: part_of(child, start, stop) for name, child in node.items()}
    if isinstance(node, Output):
        return Output(part_of(node.scores, start, stop), part_of(node.names, start, stop))
    children = [part_of(child, start, stop) for child in node]
    return type(node)(*children) if isinstance(node, Boxes) else tuple(children)


@given(dealt=dealt_trees())
def test_the_parts_of_a_batch_gathered_are_the_batch(dealt):
    tree, sizes = dealt

    def run(state):
        start = sum(sizes[: state.rank])
        return af.gather(part_of(tree, start, start + sizes[state.rank]), state)

    for found in simulate(run, world_size=len(sizes)):
        assert_same(found, tree)


@pytest.mark.parametrize(("world_size", "num_samples"), [(2, 13), (3, 5)])
def test_predictions_of_a_whole_evaluation_are_those_of_one_process_in_order(
    world_size, num_samples
):
    """Each image has as many boxes as its index: the result is ragged, and in rank order."""
    data = TensorDataset(torch.arange(num_samples))

    def detect(images):
        return [{"boxes": boxes(i % 4, start=i), "image": i} for i in images.tolist()]

    def run(state):
        loader = af.shard_loader(DataLoader(data, batch_size=5), state)
        return [one for (images,) in loader for one in af.gather(detect(images), state)]

    expected = detect(torch.arange(num_samples))
    for found in simulate(run, world_size=world_size):
        assert_same(found, expected)


LISTS = [
    [torch.ones(2, 3), torch.ones(4)],
    [torch.ones(2), {"boxes": torch.ones(2)}, None],
    [[torch.ones(2)], [torch.ones(2), "a"]],
    ["a", 7, None, Found(boxes(1), "cat")],
    [],
]


@pytest.mark.parametrize("items", LISTS, ids=str)
def test_a_list_is_rows_whatever_it_holds(items):
    def run(state):
        return af.gather({"found": items if state.rank else []}, state)

    for found in simulate(run, world_size=2):
        assert_same(found, {"found": items})


@pytest.mark.parametrize(
    "kind", [tuple, lambda each: Boxes(*each), lambda each: {"a": each[0], "b": each[1]}]
)
def test_tuples_and_dicts_are_structure_whatever_they_hold(kind):
    tree = kind([{"boxes": boxes(1)}, {"boxes": boxes(1)}])
    for found in simulate(lambda state: af.gather(tree, state), world_size=2):
        assert_same(found, kind([{"boxes": boxes(1).repeat(2, 1)}] * 2))


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (
            lambda rank: torch.ones(2, 3 + rank),
            r"got \['torch.float32 \[rows, \[4\]\]'\] on rank 1",
        ),
        (
            lambda rank: torch.ones(2, dtype=[torch.float32, torch.float64][rank]),
            "float64.* on rank 1",
        ),
        (lambda rank: {"a": torch.ones(2)} if rank else {"b": torch.ones(2)}, "on rank 1"),
        (lambda rank: ["a"] if rank else ("a",), r"\['list'\] on rank 1"),
        (lambda rank: ("a", "b"), "got a str; make a tuple of strings a list"),
        (lambda rank: torch.tensor(1.0), "got a 0-dim tensor; use reduce_sum or reduce_mean"),
        (lambda rank: {"loss": 0.5}, "got a float; use reduce_sum"),
        (lambda rank: (0.5, 0.25), "got a float; use reduce_sum"),
        (lambda rank: Found(boxes(1), "cat"), "got a str"),
        (lambda rank: ["a", lambda: 1][rank:], "items that can be pickled, got"),
        (lambda rank: torch.eye(2).to_sparse() if rank else torch.eye(2), "Tensor of layout torch"),
        (lambda rank: [TwoTensor(torch.ones(1), torch.ones(1))], "TwoTensor is no plain tensor"),
        (lambda rank: TwoTensor(torch.ones(1), torch.ones(1)), "dense tensors, got a TwoTensor"),
        (lambda rank: [{"x": torch.eye(2).to_sparse()}], "dense tensors, got a Tensor of layout"),
    ],
)
def test_trees_that_do_not_fit_are_refused_on_every_rank(tree, text):
    def run(state):
        with pytest.raises(ValueError, match=f"gather: tree must .*{text}"):
            af.gather(tree(state.rank), state)
        return af.reduce_sum(1, state)  # no rank is out of step afterwards

    assert simulate(run, world_size=2) == [2, 2]


def test_a_number_is_refused_alone_as_it_would_be_among_several():
    with pytest.raises(ValueError, match="got a int; use reduce_sum"):
        af.gather({"rows": torch.arange(4), "number": 3}, ALONE)


def test_a_world_of_one_gets_its_own_tree():
    tree = {"rows": torch.arange(4), "found": [{"boxes": boxes(2)}]}
    assert af.gather(tree, ALONE) is tree


def test_tensors_of_items_come_back_detached_and_all_of_their_own_type():
    """Only the seen part of a view travels; the buffer behind it stays."""

    def run(state):
        behind = torch.ones(100_000, requires_grad=True)
        angle = torch.ones(2).as_subclass(Angles)
        angle.unit = "degrees"
        row = {"view": behind[:2] * 1, "seen": behind.detach()[3:5], "angle": angle}
        return af.gather({"rows": [row], "angles": angle}, state)

    for found in simulate(run, world_size=2):
        assert [row["view"].requires_grad for row in found["rows"]] == [False, False]
        assert {row["seen"].untyped_storage().nbytes() for row in found["rows"]} == {8}
        for angle, size in [(found["angles"], 4), (found["rows"][1]["angle"], 2)]:
            assert type(angle) is Angles
            assert angle.unit == "degrees"
            assert angle.tolist() == [1.0] * size


def test_what_is_on_the_host_stays_there():
    """The result stays on the host even if the state's device has no memory, such as meta."""

    def run(state):
        elsewhere = dataclasses.replace(state, device=torch.device("meta"))
        return af.gather({"column": torch.ones(1), "rows": [{"x": boxes(1)}]}, elsewhere)

    for found in simulate(run, world_size=2):
        assert_same(found, {"column": torch.ones(2), "rows": [{"x": boxes(1)}] * 2})


def test_what_was_conjugated_or_transposed_arrives_as_it_reads():
    value = torch.tensor([[1 + 2j, 3j], [4, 5 - 1j]])
    trees = [value.conj(), value.T, value.conj().imag]
    for tree in trees:
        for found in simulate(lambda state, tree=tree: af.gather(tree, state), world_size=2):
            torch.testing.assert_close(found, torch.cat([tree, tree]), rtol=0, atol=0)


def test_a_column_of_any_number_of_rows_is_gathered():
    """Torch calls a column of one row, or of none, contiguous, whatever its strides are."""
    logits = torch.arange(6.0).reshape(2, 3)
    found = simulate(lambda state: af.gather(logits[: 2 - state.rank, 0], state), world_size=3)
    assert [each.tolist() for each in found] == [[0.0, 3.0, 0.0]] * 3


def test_a_dataclass_is_gathered_by_its_fields():
    def run(state):
        return af.gather(Found(boxes(1 + state.rank), ["cat"] * (1 + state.rank)), state)

    for found in simulate(run, world_size=2):
        assert type(found) is Found
        assert (len(found.boxes), found.label) == (3, ["cat"] * 3)
