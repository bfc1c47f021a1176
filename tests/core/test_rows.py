"""A batch whose rows are not its samples is warned of, or refused where it would be cut."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

ROWS = [(torch.ones(5, 3).double() * i, torch.ones(5, 1).double() * i) for i in range(24)]


def time_first(rows):
    return tuple(torch.stack(each, 1) for each in zip(*rows, strict=True))


def joined(rows):
    return tuple(torch.cat(each)[None] for each in zip(*rows, strict=True))


def views(rows):
    return tuple(torch.stack([*each, *each]) for each in zip(*rows, strict=True))


def left_out(rows):
    return default_collate(rows[1:])


def texts(world_size, collate, k=1, around=None, rows=ROWS, rebuild=tuple, options=None, **given):
    """Train in a world, and return the warnings of weights that any rank gives."""

    def train(state):
        state, step = ours.built(af.compose(af.wrap_ddp(), af.accumulate(k)), state, **given)
        loader = DataLoader(rows, collate_fn=collate, **(options or {"batch_size": 8}))
        loader = af.shard_loader(loader, state)
        for batch in around(loader, state) if around else loader:
            state, _ = step(state, rebuild(batch))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        simulate(train, world_size=world_size)
    return [str(each.message) for each in caught if "weight_fn" in str(each.message)]


AROUND = {
    "plain": {},
    "prefetch": {"around": lambda loader, state: af.prefetch(loader, state)},
    "sampler": {"options": {"batch_size": 8, "sampler": [*range(24)]}},
}


@pytest.mark.parametrize(
    ("collate", "num_rows", "around"),
    [(time_first, 5, "plain"), (joined, 1, "prefetch"), (joined, 1, "sampler")],
)
def test_rows_that_are_not_samples_are_warned_of_once(collate, num_rows, around):
    (text,) = texts(2, collate, **AROUND[around])
    assert f"a mean over, got {num_rows} for 4 samples in tensors of shapes" in text
    assert "count_labels" in text


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_that_are_not_samples_are_not_cut(world_size):
    with pytest.raises(ValueError, match="step: batch must be cut between samples, got rows"):
        texts(world_size, time_first, k=2)


@pytest.mark.parametrize(
    ("collate", "given"),
    [
        (default_collate, {}),
        (views, {}),
        (left_out, {}),
        (left_out, {"options": {"batch_size": 20}}),  # the second batch keeps one row on each rank
        (time_first, {"weight_fn": lambda batch: batch[0].size(1)}),
        (time_first, {"rebuild": lambda batch: (batch[0] + 0, batch[1])}),
    ],
    ids=["plain", "views", "left out", "one left", "weight_fn", "rebuilt"],
)
def test_other_batches_are_not_warned_of(collate, given):
    assert texts(2, collate, **given) == []


def test_a_length_that_is_the_number_of_samples_is_seen_in_a_later_batch():
    """The first batch has as many steps in time as a rank has samples."""
    first = [(torch.ones(4, 3).double(), torch.ones(4, 1).double())] * 8
    (text,) = texts(2, time_first, rows=first + ROWS[:16])
    assert "got 5 for 4 samples" in text
