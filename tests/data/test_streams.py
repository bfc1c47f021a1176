"""Streams: the options that are kept, which rank reads what, and what every rank refuses."""

import dataclasses
import multiprocessing
import os
import random
import re
import signal
import threading
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import accel_fn as af
from accel_fn.errors import PeerError
from accel_fn.testing import internals, simulate
from tests.support.streams import (
    Counting,
    SelfSplitting,
    Sharded,
    Sized,
    ids,
    items_of,
    joined,
)


@pytest.fixture
def started(monkeypatch):
    """The loaders of torch that the library starts."""
    found, start = [], DataLoader.__iter__

    def noted(loader):
        found.append(loader)
        return start(loader)

    monkeypatch.setattr(DataLoader, "__iter__", noted)
    return found


def by_hand(data, rank=0, world_size=1, batch_size=4, split="auto", **options):
    """Make a sharded loader from a state made by hand."""
    state = af.DistState(rank=rank, world_size=world_size)
    return af.shard_loader(DataLoader(data, batch_size=batch_size, **options), state, split=split)


def everywhere(data, world_size, batch_size=4, split="auto", **options):
    """Return what every simulated rank gets in epoch 0; `data` may be a function of the rank."""

    def run(state):
        mine = data(state.rank) if callable(data) else data
        loader = DataLoader(mine, batch_size=batch_size, **options)
        return ids(af.shard_loader(loader, state, split=split))

    return simulate(run, world_size=world_size)


# -- round robin


def test_a_stream_is_read_no_further_than_needed():
    data = Counting(1000)
    batches = iter(by_hand(data, 3, 4, batch_size=8))
    next(batches)
    assert data.num_read == 8


def test_a_rank_holds_little_more_than_its_part():
    """An item that is certainly in another rank's part is dropped before the batch is complete."""
    alive, most = set(), 0

    class Item:
        def __init__(self):
            alive.add(id(self))

        def __del__(self):
            alive.discard(id(self))

    class Heavy(IterableDataset):
        def __iter__(self):
            nonlocal most
            for _ in range(400):
                most = max(most, len(alive))
                yield Item()

    for rank in range(4):
        for _ in by_hand(Heavy(), rank, 4, batch_size=100, collate_fn=len):
            pass
    # its part, a quarter of the batch, two blocks, and an example
    assert most <= 100 / 4 + 100 / 4 + 2 * 16 + 1


@pytest.mark.parametrize(("drop_last", "says_length"), [(False, True), (True, False)])
@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((24, 8), "2, got its end after 8 items on rank 1 and more to come on rank 0"),
        ((8, 8, 24), "2, got more to come on rank 2 and its end after 8 items on rank 0"),
        ((11, 10), "got its end after 10 items on rank 1 and its end after 11 items on rank 0"),
    ],
)
def test_streams_of_other_lengths_are_refused_on_every_rank(drop_last, sizes, text, says_length):
    """All ranks raise at the same batch, after the items that all streams have, and none waits.

    The streams may all state one length, which is wrong on some ranks.
    """

    def run(state):
        size = sizes[state.rank]
        data = Sized(size, length=max(sizes)) if says_length else Counting(size)
        loader = DataLoader(data, batch_size=4, drop_last=drop_last)
        count = 0
        try:
            for _ in af.shard_loader(loader, state):
                count += 1
        except RuntimeError as error:
            return count, str(error)

    counts, texts = zip(*simulate(run, world_size=len(sizes), timeout_s=100), strict=True)
    assert set(counts) == {2 + (sizes == (11, 10) and not drop_last)}
    assert len(set(texts)) == 1
    assert text in texts[0]
    assert texts[0].startswith("shard_loader: loader must be over the same stream on every rank")
    assert texts[0].endswith("give every rank the whole stream")


class Texts(IterableDataset):
    """Texts and numbers, which a rank may have of its own."""

    def __init__(self, owner):
        self.owner = owner

    def __iter__(self):
        return ((f"text {number} of {self.owner}", number) for number in range(16))


@pytest.mark.parametrize("is_same", [True, False])
def test_streams_of_other_texts_are_refused_on_every_rank(is_same):
    def run(state):
        loader = DataLoader(Texts(0 if is_same else state.rank), batch_size=4, collate_fn=list)
        with (
            nullcontext()
            if is_same
            else pytest.raises((UserWarning, RuntimeError), match="same items on")
        ):
            return len(list(af.shard_loader(loader, state)))

    assert simulate(run, world_size=2) == [4 if is_same else None] * 2


def test_streams_in_which_a_position_differs_are_refused_on_every_rank():
    def run(state):
        loader = af.shard_loader(DataLoader(Counting(8 + 4 * state.rank), batch_size=4), state)
        with pytest.raises(RuntimeError, match="epochs: loader must be over the same stream on e"):
            loader.epochs(3, since=dataclasses.replace(state, step=3))
        return loader.epochs(3, since=dataclasses.replace(state, step=1)) is not None

    assert simulate(run, world_size=2) == [True, True]


def test_a_position_in_streams_with_a_length_needs_no_exchange():
    """Rank 1 asks for it without the others."""

    def run(state):
        loader = af.shard_loader(DataLoader(Sized(8), batch_size=4), state)
        return state.rank == 0 or loader.epochs(3, since=af.DistState(step=3)) is not None

    assert simulate(run, world_size=2, timeout_s=100) == [True, True]


# -- workers


def collate(items):
    info = get_worker_info()
    return {"items": torch.tensor(items), "worker": info and info.id}


def test_batches_are_collated_in_the_workers_that_read_them():
    loader = by_hand(Counting(20), num_workers=2, collate_fn=collate)
    assert [batch["worker"] for batch in loader] == [0, 1, 0, 1, 0]


class Configured(Counting):
    """Its worker_init_fn chooses its part, as in torch's documentation."""

    part = (0, 1)

    def __iter__(self):
        worker, num_workers = self.part
        return iter(self.order(self.epoch)[worker::num_workers])


def configure(worker):
    info = get_worker_info()
    info.dataset.part = (info.id, info.num_workers)


def test_worker_init_fn_may_split_the_source_among_all_workers():
    options = {"split": "workers", "num_workers": 2, "worker_init_fn": configure}
    ranks = everywhere(Configured(41), 2, **options)
    assert items_of(ranks) == list(range(41))
    assert ranks[0][0] == [0, 4]  # the first items of worker 0 of 4


@pytest.mark.parametrize("split", ["auto", "round_robin"])
def test_what_else_the_loader_was_given_is_kept(split, started):
    options = {
        "num_workers": 2,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "timeout": 50.0,
        "multiprocessing_context": multiprocessing.get_context("fork"),
        "generator": torch.Generator(),
    }
    loader = by_hand(Sharded([4, 4]), split=split, collate_fn=collate, **options)
    found = [item for batch in loader for item in batch["items"].tolist()]
    assert sorted(found) == [*range(4), *range(1000, 1004)]
    (inner,) = started
    assert {name: getattr(inner, name) for name in options} == options


class Looking(Counting):
    """A stream that reads its epoch at every item."""

    times = 0

    def set_epoch(self, epoch):
        self.times += 1
        super().set_epoch(epoch)

    def __iter__(self):
        for item in range(self.size):
            yield 100 * self.epoch + item


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "prefetch"])
@pytest.mark.parametrize("split", ["round_robin", "auto"])
def test_loaders_over_one_stream_are_each_in_their_own_epoch(split, ahead):
    data = Looking(40)
    loaders = [by_hand(data, split=split, batch_size=4) for _ in range(2)]
    if ahead:
        loaders = [af.prefetch(loader, af.DistState()) for loader in loaders]
    first, second = [
        list(loader.epochs(3))[epoch] for loader, epoch in zip(loaders, (2, 0), strict=True)
    ]
    for late, early in zip(first, second, strict=True):
        assert set(late.tolist()) <= set(range(200, 240))
        assert set(early.tolist()) <= set(range(40))


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "prefetch"])
def test_passes_at_once_of_split_sources_do_not_meet(ahead):
    """Under prefetch a thread reads each pass; which thread is the first differs between ranks."""

    def run(state):
        loader = af.shard_loader(DataLoader(Sharded([30, 90]), batch_size=4), state)
        apart = ids(loader)
        loader = af.prefetch(loader, state) if ahead else loader
        together = list(zip(loader, loader, loader, strict=True))
        return all(
            [each.tolist() for each in batches] == apart for batches in zip(*together, strict=True)
        )

    assert simulate(run, world_size=2) == [True, True]


# -- random numbers


class Drawing(IterableDataset):
    """A stream that shuffles and augments with the global generators."""

    def __iter__(self):
        order = list(range(20))
        random.shuffle(order)
        for item in order:
            yield item + 0.5 * torch.rand(()).double() + 0.25 * np.random.rand()


def draw_too(items):
    random.random()
    torch.rand(3)
    np.random.rand()
    return torch.stack(items)


def test_what_a_stream_draws_depends_on_seed_and_epoch_alone():
    """The numbers of workers and ranks, and other draws, do not matter."""
    torch.manual_seed(random.randrange(1000))
    shared = [by_hand(Drawing(), rank, 2, collate_fn=draw_too) for rank in range(2)]
    alone = by_hand(Drawing(), num_workers=1)
    for epochs in zip(*[loader.epochs(2) for loader in (*shared, alone)], strict=True):
        *parts, expected = [ids(epoch) for epoch in epochs]
        assert joined(parts) == expected
        assert sorted(int(item) for batch in expected for item in batch) == list(range(20))
    assert ids(alone) != expected


def test_the_users_generators_are_left_as_they_are():
    states = random.getstate(), np.random.get_state()[1].tolist()
    for batch in by_hand(Drawing()):
        assert len(batch) == 4
        assert states == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize(("split", "num_workers", "step"), [("round_robin", 0, 3), ("auto", 1, 3)])
def test_a_pass_draws_nothing_from_torchs_generator(split, num_workers, step):
    """Counting batches draws nothing either; otherwise a resumed run would have other dropout."""
    loader = by_hand(Sharded([9, 9]), split=split, num_workers=num_workers)
    before = torch.get_rng_state()
    for epoch in loader.epochs(2, since=af.DistState(step=step)):
        assert len(ids(epoch)) == 5 - epoch.first_batch
    assert torch.equal(torch.get_rng_state(), before)


def test_readers_of_a_split_source_draw_other_numbers():
    """They differ, unlike workers of one process that all start at one seed."""

    class Noise(SelfSplitting):
        def __iter__(self):
            for item in super().__iter__():
                yield float(item * 0 + torch.rand(()))

    for num_workers in (0, 2):
        ranks = everywhere(Noise([4] * 4), 2, split="workers", num_workers=num_workers)
        assert len(set(items_of(ranks))) == 16


def test_ranks_of_a_data_pipe_shuffle_alike():
    """The pipe draws its shuffling seed from torch's generator, unless it gets one."""
    torch.manual_seed(random.randrange(1000))
    pipe = IterableWrapper(range(24)).shuffle()
    epochs = []
    for rank in range(2):
        loader = by_hand(pipe, rank, 2)
        epochs.append([ids(epoch) for epoch in loader.epochs(2)])
    first, second = (joined(parts) for parts in zip(*epochs, strict=True))
    assert items_of([first]) == items_of([second]) == list(range(24))
    assert first != second


# -- streams that are split


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("lengths", [[9, 0, 31, 2, 2, 5], [3, 17]], ids=["six", "two"])
def test_each_rank_reads_its_own_shard_and_every_item_comes_once(num_workers, lengths, started):
    """With two shards for four workers, two workers are not started."""
    data = Sharded(lengths)
    ranks = everywhere(data, 2, num_workers=num_workers)
    assert items_of(ranks) == data.items()
    assert {each.num_workers for each in started} == {min(num_workers, len(lengths) // 2)}
    if not num_workers:
        assert sorted(data.read) == data.items()  # nothing is read twice


class Itself(Sharded):
    """A stream that is its own iterator, and begins again at each `iter`."""

    num_asked = 0

    def __iter__(self):
        self.num_asked += 1
        assert self.num_asked < 10  # within one pass
        self.left = self.items()
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


@pytest.mark.parametrize(("split", "num_workers"), [("round_robin", 0), ("auto", 1)])
def test_iter_of_a_data_set_is_called_once_a_pass(split, num_workers):
    data = Itself([25, 12])
    found = everywhere(lambda rank: Itself([25, 12]), 2, split=split, num_workers=num_workers)
    assert items_of(found) == data.items()


@pytest.mark.parametrize("split", ["round_robin", "auto"])
def test_next_of_an_iterator_is_not_called_after_its_end(split):
    """Some iterators would begin again."""

    class Anew:
        def __init__(self, items):
            self.items, self.left = items, iter(items)

        def __iter__(self):
            return self

        def __next__(self):
            try:
                return next(self.left)
            except StopIteration:
                self.left = iter(self.items)
                raise

    class Restarting(Sharded):
        def __iter__(self):
            return Anew(self.items())

    data = Restarting([6, 3])
    assert items_of(everywhere(data, 2, split=split)) == data.items()


def test_a_rank_reads_its_shards_no_further_than_needed_with_one_exchange_a_batch(monkeypatch):
    data, exchanges = Sharded([400, 400]), []
    exchange = internals.Channel.exchange

    def counted(channel, value):
        exchanges.append(value)
        return exchange(channel, value)

    def run(state):
        loader = af.shard_loader(DataLoader(data, batch_size=8), state)
        monkeypatch.setattr(internals.Channel, "exchange", counted)
        batches = iter(loader)
        for _ in range(80):
            next(batches)

    simulate(run, world_size=2)
    assert len([item for item in data.read if item < 1000]) == 80 * 4
    assert len(exchanges) == 2 * 80


def test_a_rank_at_its_end_gives_empty_batches_until_all_have_ended():
    first, second = everywhere(Sharded([3, 7]), 2)
    assert first == [[0, 1], [2], [], []]
    assert second == [[1000, 1001], [1002, 1003], [1004, 1005], [1006]]


@pytest.mark.parametrize("lengths", [[0, 0, 5], [5, 0, 0]])
def test_a_rank_without_an_item_gives_batches_of_the_form_of_the_others(lengths):
    def collate(items):
        return {"items": torch.tensor(items), "names": [f"item {item}" for item in items]}

    def run(state):
        loader = DataLoader(Sharded(lengths), batch_size=6, collate_fn=collate)
        return [
            (batch["items"].tolist(), batch["names"]) for batch in af.shard_loader(loader, state)
        ]

    full, *empty = sorted(simulate(run, world_size=3), reverse=True)
    assert [len(items) for items, _ in full] == [2, 2, 1]
    assert empty == [[([], [])] * 3] * 2


def test_items_that_cannot_be_pickled_stay_where_they_are():
    class Locks(Sharded):
        def __iter__(self):
            for _ in self.items():
                yield threading.Lock()

    def run(state):
        loader = DataLoader(Locks([2, 20]), batch_size=4, collate_fn=len)
        return list(af.shard_loader(loader, state))

    assert simulate(run, world_size=2) == [[2, *[None] * 9], [2] * 10]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_in_shards_has_no_length(num_workers):
    class Sized(Sharded):
        def __len__(self):
            return sum(self.lengths)

    def run(state):
        loader = DataLoader(Sized([4, 12, 0, 5]), batch_size=4, num_workers=num_workers)
        loader = af.shard_loader(loader, state)
        whole = [ids(epoch) for epoch in loader.epochs(2)]
        step = len(whole[0]) + 2
        (rest,) = loader.epochs(2, since=dataclasses.replace(state, step=step))
        assert ids(rest) == whole[1][2:]
        with pytest.raises(TypeError, match=r"len: stream must be read as a whole, got 'shards'; "):
            len(loader)

    simulate(run, world_size=2)


def test_a_batch_that_is_smaller_than_the_world_is_read_round_robin():
    with pytest.warns(UserWarning, match="leaves 1 of 3 ranks without samples"):
        ranks = everywhere(Sharded([0, 0, 5]), 3, batch_size=2)
    assert ranks == [[[2000], [2002], [2004]], [[2001], [2003], []], [[], [], []]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_source_that_splits_itself_sees_the_workers_of_all_ranks(num_workers):
    seen = multiprocessing.Manager().list()

    class Telling(IterableDataset):
        def __iter__(self):
            info = get_worker_info()
            seen.append((info.id, info.num_workers, info.dataset is self))
            yield from range(info.id, 24, info.num_workers)

    everywhere(Telling(), 2, split="workers", num_workers=num_workers)
    total = 2 * max(1, num_workers)
    assert sorted(seen) == [(worker, total, True) for worker in range(total)]
    assert get_worker_info() is None


def test_pinning_happens_where_batches_are_collated():
    loader = by_hand(Sharded([8, 8]), num_workers=2, pin_memory=True)
    if torch.accelerator.is_available():
        assert all(batch.is_pinned() for batch in loader)
        return
    with pytest.warns(UserWarning, match="pin_memory"):
        assert sum(len(batch) for batch in loader) == 16


# -- errors


class Failing(IterableDataset):
    """A stream that fails after some items; its other shards never end."""

    def __init__(self, after, *, fails=True):
        self.after, self.fails = after, fails

    def shard(self, *, num_shards, index):
        return Failing(self.after, fails=index == 1)

    def __iter__(self):
        yield from range(self.after)
        while not self.fails:
            yield 0
        raise RuntimeError("the disk is gone")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_the_stream_names_its_place(num_workers):
    loader = by_hand(Failing(9), rank=1, world_size=2, split="round_robin", num_workers=num_workers)
    batches = iter(loader)
    assert next(batches).tolist() == [2, 3]
    with pytest.raises(RuntimeError, match="the disk is gone") as caught:
        list(batches)
    said = str(caught.value) + "".join(caught.value.__notes__)
    assert "shard_loader: the stream failed after 9 items of epoch 0" in said
    assert "while waiting for batch 2 of epoch 0 on rank 1" in said
    assert ("in DataLoader worker process" in said) == (num_workers > 0)


def test_an_error_in_one_shard_reaches_all_ranks():
    def run(state):
        loader = DataLoader(Failing(20), batch_size=4, num_workers=1)
        loader = af.shard_loader(loader, state)
        count = 0
        try:
            for _ in loader:
                count += 1
        except Exception as error:
            return count, error

    before = set(multiprocessing.active_children())
    (count, elsewhere), (same, there) = simulate(run, world_size=2)
    assert set(multiprocessing.active_children()) <= before  # although the errors are kept
    assert count == same
    assert type(elsewhere) is PeerError
    assert "shard_loader: failed on rank 1: RuntimeError(" in str(elsewhere)
    assert "the disk is gone" in str(elsewhere)
    assert type(there) is RuntimeError
    assert "the disk is gone" in str(there)


class Dying(Sharded):
    """A stream whose worker is killed in the middle."""

    def __iter__(self):
        for item in self.items():
            if item == 1009 and get_worker_info() is None and not self.in_main():
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    def in_main(self):
        return multiprocessing.parent_process() is None


KILLED = (
    r"shard_loader: workers must live until the loop ends, "
    r"got worker \d \(process \d+\) killed by SIGKILL"
)


def test_a_killed_worker_is_an_error_on_all_ranks():
    def run(state):
        source = DataLoader(Dying([40, 40]), batch_size=4, num_workers=1, timeout=1)
        with pytest.raises(RuntimeError) as caught:
            list(af.shard_loader(source, state))
        return str(caught.value)

    first, second = simulate(run, world_size=2, timeout_s=30)
    assert re.match(KILLED + r" after 8 items of epoch 0;", second)
    assert re.search(r"failed on rank 1: WorkerError.*" + KILLED, first)


# -- length and position


@pytest.mark.parametrize("data", [Counting(10, shuffle=True), Sized(10, shuffle=True)])
@pytest.mark.parametrize("step", [0, 2, 3, 7])
def test_a_position_is_found_by_arithmetic_or_by_reading(data, step):
    loader = by_hand(data)
    whole = [batch for epoch in loader.epochs(3) for batch in ids(epoch)]
    data.num_read = 0
    resumed = list(loader.epochs(3, since=af.DistState(step=step)))
    assert (data.num_read == 0) == (isinstance(data, Sized) or step == 0)
    assert [batch for epoch in resumed for batch in ids(epoch)] == whole[step:]


def test_a_position_beyond_the_end_of_an_empty_stream_is_refused():
    with pytest.raises(ValueError, match="at most at the end of epoch 0, which is empty"):
        by_hand(Counting(0)).epochs(2, since=af.DistState(step=3))


@pytest.mark.parametrize("length", [8, 13])
def test_a_wrong_length_is_warned_of_and_what_comes_counts(length):
    loader = by_hand(Sized(10, length=length))
    with pytest.warns(UserWarning, match=f"Sized has the length {length}, .* ended at batch 3"):
        assert joined([ids(loader)]) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("method", ["indices", "global_indices"])
def test_a_stream_has_no_indices(method):
    with pytest.raises(ValueError, match="be over a data set that can be indexed, got 'Counting"):
        getattr(by_hand(Counting(10)), method)(0, 0)


# -- what is refused


class Junk(Sharded):
    def shard(self, *, num_shards, index):
        return [1, 2]


class OfARank(Counting):
    """A stream that leaves out what other ranks read."""

    rank, world_size = 0, 2

    def __init__(self):
        super().__init__(10)


def split_by_node():
    data = Counting(10)
    data._distributed = object()  # Hugging Face's data sets record it there
    return data


@pytest.mark.parametrize(
    ("data", "options", "text"),
    [
        (Counting(9), {"num_workers": 1, "in_order": False}, "in_order must be True over a stream"),
        (
            Junk([1, 1]),
            {},
            "shard.. must return an IterableDataset, got 'list'; or use split=\"round_robin\"",
        ),
        (split_by_node(), {}, "be over a whole data set, not one rank's part, got 'Counting'"),
        (OfARank(), {}, "be over a whole data set, not one rank's part, got 'OfARank'"),
        (
            Counting(9),
            {"split": "shards"},
            "split must be one of 'auto', 'round_robin', 'workers', got",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_on_every_rank(data, options, text):
    def run(state):
        given = {"batch_size": 4, **options}
        split = given.pop("split", "auto")
        with pytest.raises(ValueError, match=text):
            af.shard_loader(DataLoader(data, **given), state, split=split)

    simulate(run, world_size=2)


@pytest.mark.parametrize("split", ["auto", "workers"])
def test_splitting_needs_a_process_group(split):
    with pytest.raises(
        ValueError, match=r'process group to split a stream.*use split="round_robin"'
    ):
        by_hand(Sharded([5, 5]), rank=1, world_size=2, split=split)


class Drawn(torch.utils.data.IterableDataset):
    """Items in an order of a generator that each rank seeds by itself, of `kinds` kinds."""

    def __init__(self, kinds=48, *, of_its_own=True, make=lambda number: number):
        self.kinds, self.of_its_own, self.make = kinds, of_its_own, make

    def __iter__(self):
        order = list(range(48))
        (random.Random() if self.of_its_own else random).shuffle(order)
        return iter([self.make(number % self.kinds) for number in order])


def warnings_of(data, epochs=2, **options):
    """Return the warnings of ranks that read a stream."""

    def run(state):
        loader = af.shard_loader(torch.utils.data.DataLoader(data, **options), state)
        for _ in range(epochs):
            list(loader)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        simulate(run, world_size=2)
    return [str(each.message) for each in found]


@pytest.mark.parametrize(
    ("make", "batch_size"),
    [
        (lambda number: torch.as_tensor(number), 4),
        (lambda number: {"half": 0.5 * torch.as_tensor(number)}, 24),
        (lambda number: np.asarray(number), None),
    ],
    ids=["tensors", "dicts", "arrays"],
)
def test_items_that_each_rank_draws_by_itself_are_warned_of_once(make, batch_size):
    data = Drawn(make=make if batch_size else lambda number: make(number + torch.arange(2)))
    (text,) = warnings_of(data, batch_size=batch_size)
    assert re.match(
        "shard_loader: Drawn should give the same items on every rank, .* got others", text
    )


@pytest.mark.parametrize(
    "data",
    [Drawn(of_its_own=False), Drawn(kinds=8), Drawn(make=lambda number: torch.tensor([[1.0]]))],
    ids=["global generator", "eight kinds of items", "equal items"],
)
def test_items_that_are_the_same_or_say_little_are_not_warned_of(data):
    assert warnings_of(data, batch_size=4) == []
