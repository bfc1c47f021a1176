"""The part of a rank without samples has the form of the others, without rows."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import accel_fn as af


def last_of(rows, world_size=2, **options):
    """Return the part of the last rank of a batch of one sample."""
    loader = DataLoader(rows, batch_size=world_size, **options)
    state = af.DistState(rank=world_size - 1, world_size=world_size)
    return list(af.shard_loader(loader, state))[-1]


ROWS = [{"x": torch.ones(4), "y": index, "text": f"text {index}"} for index in range(3)]
PAIRS = [(torch.ones(4), index) for index in range(3)]
IMAGES = [torch.ones(3, 4 + index) for index in range(3)]


def form(batch):
    """Describe a batch by the shapes of its tensors."""
    return torch.utils._pytree.tree_map(
        lambda leaf: tuple(leaf.shape) if hasattr(leaf, "shape") else leaf, batch
    )


class Texts(Dataset):
    """Reads many samples at once, as data sets of Hugging Face do."""

    def __len__(self):
        return 3

    def __getitems__(self, numbers):
        return {"x": torch.ones(len(numbers), 2), "text": [f"text {each}" for each in numbers]}


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence([row.flatten() for row in rows], batch_first=True)


def labelled(rows):
    """Take the labels out of the samples, as many collators do."""
    labels = torch.tensor([row.pop("y") for row in rows])
    return {"x": torch.stack([row["x"] for row in rows]), "labels": labels}


@pytest.mark.parametrize(
    ("rows", "collate_fn", "expected"),
    [
        (torch.ones(3, 4), None, (0, 4)),
        (np.ones((3, 4)), None, (0, 4)),
        (PAIRS, None, [(0, 4), (0,)]),
        (ROWS, None, {"x": (0, 4), "y": (0,), "text": []}),
        (["a", "b", "c"], None, []),
        (Texts(), lambda batch: batch, {"x": (0, 2), "text": []}),
        (IMAGES, padded, (0, 18)),
        (IMAGES, af.samples, []),
        (IMAGES, lambda rows: (af.samples(rows), len(rows), torch.tensor(1.0)), ([], 1, ())),
        ([{**row} for row in ROWS], labelled, {"x": (0, 4), "labels": (0,)}),
        # two views of each sample
        (PAIRS, lambda rows: torch.cat([default_collate(rows)[0]] * 2), (0, 4)),
    ],
)
def test_an_empty_part_has_the_form_of_the_others(rows, collate_fn, expected):
    assert form(last_of(rows, collate_fn=collate_fn)) == expected


class Graph:
    """A class that torch's pytree does not know."""

    def __init__(self, nodes):
        self.nodes = nodes


@pytest.mark.parametrize(
    "collate_fn",
    [
        lambda rows: torch.cat([row.flatten() for row in rows]).unsqueeze(0),  # padding-free
        lambda rows: torch.stack([row[0, :4] for row in rows], 1),  # time first
        lambda rows: Graph(torch.stack([row[:, :4] for row in rows])),
        lambda rows: {"x": torch.stack([row[:, :4] for row in rows]), "table": torch.ones(5)},
        lambda rows: {"scale": torch.tensor(1.0)},
        lambda rows: None,
    ],
    ids=["one row", "time first", "object", "table", "no rows", "None"],
)
def test_what_cannot_be_cut_is_none(collate_fn):
    assert last_of(IMAGES, collate_fn=collate_fn) is None


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"a": torch.ones(1)}, {"a": torch.ones(2), "b": torch.ones(2)}),
        ([torch.ones(1)], [torch.ones(2), torch.ones(2), torch.ones(2)]),
        (torch.ones(1), None),
        (torch.eye(1).to_sparse(), torch.eye(2).to_sparse()),
    ],
)
def test_the_empty_part_of_batches_of_two_forms_is_none(one, two):
    assert last_of(IMAGES, collate_fn=lambda rows: one if len(rows) == 1 else two) is None


def test_a_collate_fn_that_fails_on_the_example_names_the_sample():
    def collate(rows):
        raise KeyError("no column")

    with pytest.raises(KeyError, match="no column") as caught:
        last_of(PAIRS[:1], collate_fn=collate)
    assert "collate_fn failed on sample 0, whose form an empty part takes" in str(
        caught.value.__notes__
    )


def test_ready_batches_of_lists_are_cut_to_no_rows():
    class Ready(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, numbers):
            return {"x": torch.ones(len(numbers), 2), "text": [str(each) for each in numbers]}

    options = {"batch_size": None, "sampler": [[0, 1], [2]]}
    loader = af.shard_loader(DataLoader(Ready(), **options), af.DistState(rank=1, world_size=2))
    first, last = loader
    assert first["text"] == ["1"]
    assert form(last) == {"x": (0, 2), "text": []}
