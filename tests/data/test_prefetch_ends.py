"""The end of a prefetch pass, by a break, an error or an interrupt, leaves no thread on any
rank."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest
from torch.utils.data import DataLoader, IterableDataset

import accel_fn as af
from accel_fn.testing import simulate
from tests.support.prefetch import (
    HERE,
    eventually,
    readers,
)
from tests.support.processes import ROOT

pytestmark = pytest.mark.usefixtures("no_reader_is_left")


def test_a_break_waits_for_the_batch_that_is_being_read_and_for_no_other():
    """The thread of this pass and that of the next never read the data set at the same time."""
    num_read, go = [], threading.Event()

    def slowly():
        for number in range(9):
            num_read.append(number)
            if number == 1:
                go.wait(timeout=100)
            yield number

    for _ in af.prefetch(slowly(), HERE, depth=4):
        assert eventually(lambda: num_read == [0, 1])
        threading.Timer(0.1, go.set).start()
        break
    assert go.is_set()
    assert num_read == [0, 1]


def test_an_iterator_in_a_cycle_ends_its_thread_when_it_is_collected():
    class Holder:
        pass

    gc.disable()
    try:
        holder = Holder()
        holder.self, holder.passed = holder, iter(af.prefetch(range(100), HERE))
        next(holder.passed)
        del holder
        assert len(readers()) == 1
    finally:
        gc.enable()
    gc.collect()
    assert readers() == []


class Uneven(IterableDataset):
    """Shards of unequal lengths, whose items move between ranks."""

    def __init__(self, index=0, num_shards=1):
        self.index, self.num_shards = index, num_shards

    def shard(self, num_shards, index):
        return Uneven(index, num_shards)

    def __iter__(self):
        return (x for x in range(61) if x * x % 7 % self.num_shards == self.index)


def test_a_stream_that_ranks_share_is_the_same_read_ahead():
    def run(state, depth):
        loader = af.shard_loader(DataLoader(Uneven(), batch_size=6), state)
        loader = af.prefetch(loader, state, depth) if depth else loader
        found = []
        for epoch in loader.epochs(2):
            for number, batch in enumerate(epoch):
                found.append(batch.tolist())
                if (epoch.index, number) == (0, 2):
                    break
        together = zip(*loader.epochs(2), strict=True)
        return found, [[a.tolist(), b.tolist()] for a, b in together]

    expected = simulate(lambda state: run(state, 0), world_size=3)
    assert len(expected[0][0]) == 3 + 11
    assert simulate(lambda state: run(state, 4), world_size=3) == expected


# -- errors


def fails_at(number):
    yield from range(number)
    raise KeyError("the batch after", number)


@pytest.mark.parametrize("number", [0, 1, 5])
def test_an_error_comes_where_its_batch_would_have_come(number):
    found = []
    passed = iter(af.prefetch(fails_at(number), HERE, depth=3))
    with pytest.raises(KeyError, match="the batch after") as caught:
        found.extend(passed)  # `extend` keeps the batches before the error
    assert found == list(range(number))
    assert readers() == []
    assert "fails_at" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert list(passed) == []


@pytest.mark.parametrize("depth", [0, 1.5, None])
def test_a_depth_is_a_count(depth):
    with pytest.raises(ValueError, match="prefetch: depth must be an integer >= 1, got"):
        af.prefetch([1], HERE, depth)


def test_what_cannot_be_iterated_is_refused():
    with pytest.raises(TypeError, match=r"prefetch: loader must be a loader, .* got 'int'"):
        af.prefetch(3, HERE)


# -- processes

SLOW = """
import time, torch
import accel_fn as af
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index >= 1:
            time.sleep(600)
        return torch.tensor(index)

if __name__ == "__main__":
    state = af.DistState()
    loader = af.shard_loader(DataLoader(Slow(), batch_size=1, num_workers={workers}), state)
    batches = iter(af.prefetch(loader, state))
    {main}
"""


def start(**settings):
    code = SLOW.format(**{"workers": 0, **settings})
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_program_ends_though_its_loader_does_not():
    """At the end of the program the iterator is alive, and its thread reads."""
    process = start(main="next(batches); print(time.monotonic(), flush=True)")
    output, errors = process.communicate(timeout=250)
    assert time.monotonic() - float(output) < 100  # a sample takes 600 s
    assert (process.returncode, errors) == (0, "")


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("where", "workers"), [("next(batches)", 0), ("time.sleep(600)", 2)], ids=["waiting", "working"]
)
def test_an_interrupt_stops_the_loop_at_once(where, workers):
    process = start(main=f"next(batches); print('go', flush=True); {where}", workers=workers)
    assert process.stdout.readline() == "go\n"
    time.sleep(0.2)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=250)
    assert time.monotonic() - started < 100
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
