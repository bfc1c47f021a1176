"""A list of samples that a collate_fn does not mark is refused; collates that change rows are not."""

import random
import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.testing import simulate
from tests.support.streams import Counting, Sharded

ALONE = af.DistState()
REPAIR = "return af.samples([...]) from collate_fn"


def image(number):
    return torch.full((3, 4 + number % 3, 5), float(number))


def rows_of(numbers):
    return [
        (image(int(n)), {"boxes": torch.ones(int(n) % 2, 4), "id": torch.tensor(n)})
        for n in numbers
    ]


def collated(collate, rows):
    """Return the batch of a loader over these rows."""
    given = DataLoader(rows, batch_size=len(rows), collate_fn=collate)
    (batch,) = af.shard_loader(given, ALONE)
    return batch


def images(rows):
    return [image for image, _ in rows]


def pairs(rows):
    return list(rows)


def columns(rows):
    return tuple(zip(*rows, strict=True))


def column_lists(rows):
    return [list(column) for column in zip(*rows, strict=True)]


def in_a_dict(rows):
    return {"size": torch.ones(len(rows)), "inputs": ([image for image, _ in rows], "text")}


def some_lost(rows):
    return [image if number else None for number, (image, _) in enumerate(rows)]


def numbers_alone(rows):
    return [target["id"] for _, target in rows]


UNMARKED = [pairs, column_lists, in_a_dict, some_lost, numbers_alone]


@pytest.mark.parametrize("collate", UNMARKED)
@pytest.mark.parametrize("num_rows", [2, 5])
def test_a_list_of_samples_is_refused_unless_it_is_marked(collate, num_rows):
    with pytest.raises(ValueError, match=re.escape(REPAIR)):
        collated(collate, rows_of(range(num_rows)))


def test_the_refusal_describes_the_list():
    text = (
        "shard_loader: collate_fn must mark a list of samples, got a tuple of 5 items for 5 samples, "
        "with tensors of shapes [3, 4, 5], [3, 5, 5], [3, 6, 5], ...; return af.samples([...]) from "
        "collate_fn, or a dict if the items are fields"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        collated(columns, rows_of(range(5)))


def marked(rows):
    return tuple(af.samples(column) for column in zip(*rows, strict=True))


def packed(rows):
    """All pixels of all images in one row."""
    pixels = torch.cat([image.flatten() for image, _ in rows])
    return [pixels, pixels.cumsum(0)]


def nothing(rows):
    return None


def counted(collate, *sizes):
    """Return of how many rows each call of a collate_fn was, for batches of these sizes."""
    calls = []

    def counting(rows):
        calls.append(len(rows))
        return collate(rows)

    batches = [range(size) for size in sizes]
    given = DataLoader(rows_of(range(max(sizes))), batch_sampler=batches, collate_fn=counting)
    list(af.shard_loader(given, ALONE))
    return calls


def test_fields_are_recognised_once():
    assert counted(packed, 3, 2, 2, 2) == [3, 2, 4, 2, 2]


def test_recognising_fields_draws_no_random_numbers():
    def collate(rows):
        pixels, sums = packed(rows)
        return pixels * (torch.rand(1) + random.random() + np.random.rand()), sums

    def drawn(fn):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        found = [fn(rows_of(range(2)))[0] for _ in range(2)]
        return [each.tolist() for each in found], float(torch.rand(1)), random.random()

    assert drawn(lambda rows: collated(collate, rows)) == drawn(collate)


def test_a_collate_fn_that_takes_fields_out_of_its_samples_is_refused():
    """It cannot run again, so nothing shows that its two items are fields."""

    def collate(rows):
        return packed([(row.pop("image"), None) for row in rows])

    with pytest.raises(ValueError, match="or a dict if the items are fields"):
        collated(collate, [{"image": image(number)} for number in range(2)])


def batches_of(state, collate, data=range(16), **options):
    loader = DataLoader(data, batch_size=8, collate_fn=collate, **options)
    return list(af.shard_loader(loader, state))


def images_of(numbers):
    return images(rows_of(numbers))


def marked_of(numbers):
    return marked(rows_of(numbers))


SOURCES = {
    "index": dict,
    "sampler": lambda: {"sampler": [*range(16)]},
    "stream": lambda: {"data": Counting(16)},
    "stream in a worker": lambda: {"data": Counting(16), "num_workers": 1},
    "split stream": lambda: {"data": Sharded([8, 8])},
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_source_refuses_an_unmarked_list_and_gives_a_marked_one(source):
    def run(state):
        with pytest.raises(ValueError, match=re.escape(REPAIR)):
            batches_of(state, images_of, **source())
        return batches_of(state, marked_of, **source())

    found = [part for parts in zip(*simulate(run, world_size=2), strict=True) for part in parts]
    assert [af.count_samples(part) for part in found] == [4] * 4
    assert all(type(column) is type(af.samples([])) for part in found for column in part)


def test_a_data_set_that_gives_many_samples_at_once_is_checked_by_their_numbers():
    class Columns(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, number):
            raise AssertionError("read alone")

        def __getitems__(self, numbers):
            return {"images": images_of(numbers)}

    with pytest.raises(ValueError, match="got a list of 8 items for 8 samples"):
        batches_of(ALONE, lambda columns: columns, Columns())
