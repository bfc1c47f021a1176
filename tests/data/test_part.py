"""part: a rank's rows of a batch that comes from no loader."""

import copy
import dataclasses
from typing import Any

import pytest
import torch

import accel_fn as af

TWO = af.DistState(rank=1, world_size=2)


@pytest.mark.parametrize("num_rows", [5, 3, 1, 0])
def test_ranks_take_the_parts_that_a_loader_would_give_them(num_rows):
    rows = torch.arange(num_rows)
    states = [af.DistState(rank=rank, world_size=3) for rank in range(3)]
    parts = [af.shard_batch({"rows": rows, "lr": torch.tensor(0.1)}, state) for state in states]
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
    assert af.shard_batch(tree, af.DistState()) is tree
    af.shard_batch(tree, TWO)["rows"].zero_()
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
    with pytest.raises(ValueError, match=f"^shard_batch: tree must .*{text}"):
        af.shard_batch(tree, TWO)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_is_refused(layout):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(
        ValueError, match=r"^shard_batch: tree must hold dense .*, got a nested one"
    ):
        af.shard_batch((torch.ones(2), nested), TWO)


@pytest.mark.parametrize("beside", [[0.5, 0.25], (224, 224, 3, 1), [[1], [2]]], ids=str)
def test_numbers_of_another_length_than_the_rows_are_settings(beside):
    assert af.shard_batch((torch.ones(3), beside), TWO)[1] == beside


def test_its_arguments_are_not_exchanged():
    with pytest.raises(TypeError, match="shard_batch: state must be a DistState, got 'Tensor'"):
        af.shard_batch(TWO, torch.ones(2))


def test_a_list_alone_is_rows():
    assert af.shard_batch(["a", "b", "c"], TWO) == ["c"]
    assert af.shard_batch([1, 2, 3], TWO) == [3]
    assert af.shard_batch({"a": torch.tensor(2.0), "b": ["x", "y"]}, TWO)["b"] == ["y"]


@dataclasses.dataclass(frozen=True)
class Batch:
    rows: torch.Tensor
    texts: list[str]
    setting: Any = None

    def __post_init__(self):
        assert len(self.texts) == 3, "is called for the whole batch alone"


@dataclasses.dataclass
class Setting:
    sizes: list[int]


def test_the_fields_of_a_dataclass_are_cut_and_settings_are_whole():
    setting = Setting([1, 2, 3])
    whole = Batch(torch.arange(3), ["a", "b", "c"], setting)
    found = af.shard_batch(whole, af.DistState(rank=0, world_size=2))
    assert type(found) is Batch
    assert (found.rows.tolist(), found.texts) == ([0, 1], ["a", "b"])
    assert found.setting is setting
    assert whole.texts == ["a", "b", "c"]
    assert af.count_samples(found) == 2
    moved = af.extend.to_device(found, af.DistState(device=torch.device("meta")))
    assert moved.rows.device.type == "meta"
    assert moved.setting is setting


def test_a_loader_gives_dataclasses_and_empty_ones():
    rows = [torch.full((2,), float(i)) for i in range(5)]

    def collate(rows):
        batch = Batch(torch.zeros(3), ["a", "b", "c"])
        return dataclasses.replace(batch) if not rows else _made(rows)

    loader = torch.utils.data.DataLoader(rows, 4, collate_fn=collate)
    sharded = af.shard_loader(loader, af.DistState(rank=1, world_size=2))
    first, last = sharded
    assert (first.rows[:, 0].tolist(), first.texts) == ([2.0, 3.0], ["2.0", "3.0"])
    assert (last.rows.shape, last.texts) == ((0, 2), [])


def _made(rows):
    made = copy.copy(Batch(torch.zeros(3), ["a", "b", "c"]))
    object.__setattr__(made, "rows", torch.stack(rows))
    object.__setattr__(made, "texts", [str(float(row[0])) for row in rows])
    return made


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_dataset_of_hugging_face_is_cut_by_its_rows(world_size):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"id": [1, 2, 3, 4], "text": ["a", "b", "c", "d"]})
    states = [af.DistState(rank=rank, world_size=world_size) for rank in range(world_size)]
    parts = [af.shard_batch(table, state) for state in states]
    assert {type(part) for part in parts} == {datasets.Dataset}
    assert [number for part in parts for number in part["id"]] == [1, 2, 3, 4]
    assert max(map(len, parts)) <= min(map(len, parts)) + 1
