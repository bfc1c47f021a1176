"""part: a rank's rows of a batch that comes from no loader."""

import pytest
import torch

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
        ((torch.ones(3), torch.ones(2, 1)), r"one leading dimension, got \[\(3,\), \(2, 1\)\]"),
        (torch.tensor(1.0), "hold tensors of one leading dimension, got 'Tensor'"),
        ({"texts": ["a", "b"]}, "got 'dict'"),
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
