"""part: a rank's rows of a batch that comes from no loader."""

from collections import UserDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af

TWO = af.DistState(rank=1, world_size=2)


@pytest.mark.parametrize("num_rows", [5, 3, 1, 0])
def test_ranks_take_the_parts_that_a_loader_would_give_them(num_rows):
    rows = torch.arange(num_rows)
    states = [af.DistState(rank=rank, world_size=3) for rank in range(3)]
    parts = [af.part({"rows": rows, "lr": torch.tensor(0.1)}, state) for state in states]
    assert torch.cat([part["rows"] for part in parts]).tolist() == rows.tolist()
    assert {float(part["lr"]) for part in parts} == {float(torch.tensor(0.1))}
    if num_rows >= 3:
        data = torch.utils.data.TensorDataset(rows)
        loader = torch.utils.data.DataLoader(data, batch_size=num_rows)
        for state, part in zip(states, parts, strict=True):
            ((expected,),) = af.shard_loader(loader, state)
            assert part["rows"].tolist() == expected.tolist()


def test_a_world_of_one_gets_its_own_tree_and_others_get_views():
    tree = {"rows": torch.arange(4)}
    assert af.part(tree, af.DistState()) is tree
    af.part(tree, TWO)["rows"].zero_()
    assert tree["rows"].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (
            (torch.ones(3), torch.ones(2, 1)),
            r"hold tensors or lists of one length, got \[\(3,\), \(2, 1\)\]",
        ),
        (torch.tensor(1.0), "hold tensors or lists of one length, got 'Tensor'"),
        ({"texts": ("a", "b")}, "hold tensors or lists of one length, got 'dict'"),
        ([torch.tensor(1.0), torch.tensor(2.0)], "of one length, got 'list'"),
        ({"prompts": ["a", "b", "c"], "stops": ["."]}, r"of one length, got \[\(3,\), \(1,\)\]"),
        ({"prompts": ["a", "b", "c"], "names": ("a", "b")}, "got 2 items beside 3 samples"),
        ((torch.ones(3), [0.1, 0.2, 0.3]), "not hold as many numbers as samples in a list or tup"),
        ((torch.ones(3), ["a", "b"]), "of one item a sample, got 2 items beside 3 samples"),
    ],
)
def test_trees_without_rows_are_refused(tree, text):
    with pytest.raises(ValueError, match=f"^part: tree must .*{text}"):
        af.part(tree, TWO)


def test_its_arguments_are_not_exchanged():
    with pytest.raises(TypeError, match="part: state must be a DistState, got 'Tensor'"):
        af.part(TWO, torch.ones(2))


@given(num_rows=st.integers(0, 9), world_size=st.integers(1, 4))
def test_items_of_lists_are_rows_where_no_tensor_has_any(num_rows, world_size):
    names = [f"row {number}" for number in range(num_rows)]
    tree = {"names": names, "more": (UserDict(words=[[name] for name in names]),), "limit": 20}
    parts = [
        af.part(tree, af.DistState(rank=rank, world_size=world_size)) for rank in range(world_size)
    ]
    tensors = [
        af.part(torch.arange(num_rows), af.DistState(rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert [len(part["names"]) for part in parts] == [len(each) for each in tensors]
    assert [name for part in parts for name in part["names"]] == names
    assert [word for part in parts for word in part["more"][0]["words"]] == [[n] for n in names]
    assert {part["limit"] for part in parts} == {20}
    kinds = {(type(part["names"]), type(part["more"][0])) for part in parts}
    assert kinds == {(list, UserDict)}


def test_a_list_alone_is_rows():
    assert af.part(["a", "b", "c"], TWO) == ["c"]
    assert af.part([1, 2, 3], TWO) == [3]
    assert af.part({"a": torch.tensor(2.0), "b": ["x", "y"]}, TWO)["b"] == ["y"]
