"""samples: each item of the list counts as one sample, whatever it holds and wherever it stands."""

import copy
import pickle
from collections import UserDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils.data._utils.pin_memory import pin_memory

import accel_fn as af

SIZES = (4, 2, 3, 3, 6)
IMAGES = [torch.full((3, size, 5), float(size)) for size in SIZES]
TARGETS = [{"boxes": torch.ones(size % 3, 4), "id": torch.tensor(size)} for size in SIZES]
BATCHES = {
    "alone": af.samples(IMAGES),
    "tuple": (af.samples(IMAGES), af.samples(TARGETS)),
    "list": [af.samples(IMAGES), af.samples(TARGETS)],
    "pairs": af.samples(zip(IMAGES, TARGETS, strict=True)),
    "dict": {"images": af.samples(IMAGES), "label": torch.arange(5), "names": [*"abcde"]},
    "deep": {"inputs": UserDict(images=(af.samples(IMAGES), torch.tensor(0.5)))},
}
batches = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)


@batches
def test_items_count_and_their_tensors_do_not(batch):
    assert af.count_samples(batch) == 5


def dict_of(batch):
    """Replace the mapping that torch's pytree does not know."""
    return (
        {**batch, "inputs": {**batch["inputs"]}}
        if isinstance(batch, dict) and "inputs" in batch
        else batch
    )


@batches
@given(world_size=st.integers(1, 7))
def test_parts_hold_every_item_once_and_in_order(batch, world_size):
    states = [af.DistState(rank=rank, world_size=world_size) for rank in range(world_size)]
    parts = [af.shard_batch(batch, state) for state in states]
    sizes = [len(rows) for rows in torch.arange(5).tensor_split(world_size)]
    assert [af.count_samples(part) for part in parts] == sizes
    leaves = [leaf for part in parts for leaf in pytree.tree_leaves(dict_of(part))]
    joined = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim == 3]
    assert [*map(id, joined)] == [*map(id, IMAGES)]


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        pin_memory,
        lambda images: pickle.loads(pickle.dumps(images)),
        lambda images: af.extend.to_device(images, af.DistState()),
        lambda images: pytree.tree_map(torch.clone, images),
        lambda images: af.samples([*images, IMAGES[0]])[:-1],
    ],
    ids=["copy", "deepcopy", "pinning", "pickle", "to_device", "pytree", "slice"],
)
def test_copies_are_samples(copied, monkeypatch):
    # There may be no accelerator.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    found = copied(af.samples(IMAGES))
    assert type(found) is type(af.samples([]))
    assert all(map(torch.equal, found, IMAGES))


def test_a_model_that_takes_a_list_takes_samples():
    assert isinstance(af.samples(IMAGES), list)
    assert af.samples(IMAGES)[1] is IMAGES[1]


def test_items_that_are_none_are_left_out():
    found = af.samples([None, IMAGES[0], None, IMAGES[1]])
    assert [*map(id, found)] == [id(IMAGES[0]), id(IMAGES[1])]
    assert af.count_samples(af.samples([None])) == 0


def test_a_batch_that_is_none_has_no_samples():
    assert af.count_samples(None) == 0
    assert af.shard_batch(None, af.DistState(rank=1, world_size=2)) is None


@pytest.mark.parametrize("beside", [torch.ones(4, 2), af.samples(IMAGES[:4])], ids=["rows", "list"])
def test_other_numbers_of_samples_beside_them_are_refused(beside):
    text = r"got shapes \[\(5,\), \(4,( 2)?\)\]; mark a list of samples by af.samples, or give Plan"
    with pytest.raises(ValueError, match=text):
        af.count_samples((af.samples(IMAGES), beside))


@pytest.mark.parametrize(
    ("items", "got"),
    [
        (torch.ones(3), "'Tensor'; the rows of a tensor are samples already"),
        ({"images": IMAGES}, "'dict'$"),
        ("text", "'str'$"),
        (3, "'int'$"),
    ],
)
def test_what_has_no_items_is_refused(items, got):
    text = f"^samples: items must be a list of one item a sample, got {got}"
    with pytest.raises(TypeError, match=text):
        af.samples(items)
