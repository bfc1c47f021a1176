"""Law 8 for streams: every item once an epoch and equally many batches, for any shards.

Round robin, the parts are even and joined the batches of one rank. Of its own shards, a rank gives
full parts until one ends, then empty ones.
"""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours
from tests.support.streams import (
    Counting,
    SelfSplitting,
    Sharded,
    global_batches,
    ids,
    joined,
)


@st.composite
def cuts(draw, max_items=200):
    """Draw a number of items, ranks, a batch size and `drop_last`."""
    world_size = draw(st.integers(1, 8))
    batch_size = draw(st.integers(1, 64))
    return draw(st.integers(0, max_items)), world_size, batch_size, draw(st.booleans())


def turns(data, world_size, batch_size, epochs=1, step=0, **options):
    """Return what every rank gets of a stream in round robin, from states made by hand."""
    found = []
    for rank in range(world_size):
        state = af.DistState(rank=rank, world_size=world_size, step=step)
        loader = af.shard_loader(DataLoader(data, batch_size=batch_size, **options), state)
        found.append(
            [batch for epoch in loader.epochs(epochs, since=state) for batch in ids(epoch)]
        )
    return found


@given(cut=cuts())
@example(cut=(9, 3, 4, False))  # the last batch is smaller than the world
@example(cut=(3, 3, 3, False))
@example(cut=(0, 4, 8, False))
def test_ranks_that_take_turns_give_the_stream_once_and_in_order(cut):
    num_items, world_size, batch_size, drop_last = cut
    expected = global_batches(list(range(num_items)), batch_size, drop_last)
    ranks = turns(Counting(num_items), world_size, batch_size, drop_last=drop_last)
    assert joined(ranks) == expected
    for parts in zip(*ranks, strict=True):
        sizes = [len(part) for part in parts]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


@given(cut=cuts(max_items=60), step=st.integers(0, 40), other=st.integers(1, 8))
def test_resuming_in_a_stream_in_any_world_is_going_on(cut, step, other):
    num_items, world_size, batch_size, drop_last = cut
    data = Counting(num_items, shuffle=True)
    if not global_batches(list(range(num_items)), batch_size, drop_last):
        return
    whole = turns(data, world_size, batch_size, epochs=3, drop_last=drop_last)
    step = min(step, len(whole[0]))
    rest = turns(data, world_size, batch_size, epochs=3, step=step, drop_last=drop_last)
    assert rest == [parts[step:] for parts in whole]
    elsewhere = turns(data, other, batch_size, epochs=3, step=step, drop_last=drop_last)
    assert joined(elsewhere) == joined(rest)


@pytest.mark.slow
@given(cut=cuts(max_items=60), step=st.integers(0, 3))
@ours.share(0.16)
def test_workers_that_take_turns_change_nothing(cut, step):
    num_items, world_size, batch_size, drop_last = cut
    world_size = min(world_size, 3)
    data = Counting(num_items, shuffle=True)
    if not global_batches(list(range(num_items)), batch_size, drop_last):
        return
    options = {"step": step, "epochs": 8, "drop_last": drop_last}
    alone = turns(data, world_size, batch_size, **options)
    assert turns(data, world_size, batch_size, num_workers=2, **options) == alone


@st.composite
def shards(draw, max_world=5):
    """Draw lengths of shards, also 0, at least one shard per rank."""
    world_size = draw(st.integers(1, max_world))
    lengths = draw(st.lists(st.integers(0, 20), min_size=world_size, max_size=2 * world_size))
    batch_size = draw(st.integers(1, 24))
    return lengths, world_size, batch_size, draw(st.booleans())


def check_split(data, world_size, batch_size, drop_last, *, split="auto", num_workers=0):
    """Assert that every item comes once, in equally many batches, and that resuming is going on."""

    def run(state):
        options = {"drop_last": drop_last, "num_workers": num_workers}
        loader = DataLoader(data, batch_size=batch_size, **options)
        loader = af.shard_loader(loader, state, split=split)
        whole = ids(loader)
        step = len(whole) // 2
        after = next(iter(loader.epochs(1, since=af.DistState(step=step))), [])
        assert ids(after) == whole[step:]
        return whole

    ranks = simulate(run, world_size=world_size)
    seen = sorted(item for parts in ranks for part in parts for item in part)
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(data.items())
    if not drop_last:
        assert seen == sorted(data.items())
    for batch in zip(*ranks, strict=True):
        assert 1 <= sum(map(len, batch)) <= batch_size
    if batch_size < world_size:  # round robin
        assert len(seen) == len(data.items()) - drop_last * (len(data.items()) % batch_size)
        return
    for rank, parts in enumerate(ranks):
        size = batch_size // world_size + (rank < batch_size % world_size)
        short = [len(part) for part in parts if len(part) not in (0, size)]
        assert len(short) <= (0 if drop_last else max(1, num_workers))  # one a reader


@given(drawn=shards())
@ours.share(0.34)
@example(drawn=([0, 0, 60], 3, 24, False))
@example(drawn=([0, 0, 3], 3, 2, False))  # a rank that never has an item
@example(drawn=([60] * 5, 5, 5, True))
def test_every_item_of_uneven_shards_comes_once(drawn):
    lengths, world_size, batch_size, drop_last = drawn
    check_split(Sharded(lengths), world_size, batch_size, drop_last)


@given(drawn=shards())
@ours.share(0.34)
@example(drawn=([60, 0, 0], 3, 4, False))
def test_every_item_of_a_source_that_splits_itself_comes_once(drawn):
    lengths, world_size, batch_size, drop_last = drawn
    check_split(SelfSplitting(lengths), world_size, batch_size, drop_last, split="workers")


@pytest.mark.slow
@given(drawn=shards(max_world=3), split=st.sampled_from(["auto", "workers"]))
@ours.share(0.16)
def test_every_item_that_workers_read_comes_once(drawn, split):
    lengths, world_size, batch_size, drop_last = drawn
    data = Sharded(lengths) if split == "auto" else SelfSplitting(lengths)
    check_split(data, world_size, batch_size, drop_last, split=split, num_workers=2)
