"""An error of data names sample, batch, epoch and worker, and a pass that ends leaves nothing
behind."""

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import threading
import time
import weakref

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import accel_fn as af
from accel_fn.errors import WorkerError


class Failing(Dataset):
    """A data set of numbers, one of whose samples does something else."""

    def __init__(self, at, act, size=24):
        self.at, self.act, self.size = at, act, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.act(index) if index == self.at else index


class TwoWordsError(Exception):
    def __init__(self, first, second):
        super().__init__(first, second)


def raising(error):
    def act(index):
        raise error

    return act


def killed(index):
    """Kill this process, as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def loader_of(data, num_workers=0, persistent=False, batch_size=4, **options):
    if num_workers:
        options |= {"multiprocessing_context": "fork", "persistent_workers": persistent}
    given = DataLoader(data, batch_size=batch_size, num_workers=num_workers, **options)
    return af.shard_loader(given, af.DistState())


def ids(epoch):
    return [batch.tolist() for batch in epoch]


def processes():
    return {child.pid for child in multiprocessing.active_children()}


@pytest.fixture(autouse=True)
def short_wait(monkeypatch):
    """Shorten torch's wait: it checks its workers every 5 s."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))


@pytest.fixture(autouse=True)
def nothing_left():
    """Assert that no process and no thread is left that was not there before."""
    before, threads = processes(), set(threading.enumerate())
    yield
    gc.collect()  # an error that pytest.raises holds keeps frames alive
    assert processes() <= before
    for thread in set(threading.enumerate()) - threads:  # threads of queues, which nobody joins
        thread.join(2)
        assert not thread.is_alive()


def second_epoch(loader):
    return list(loader.epochs(2))[1]


def test_a_sample_that_fails_in_a_worker_names_its_place_and_worker():
    with pytest.raises(OSError, match="rotten") as caught:
        ids(second_epoch(loader_of(Failing(13, raising(OSError(5, "rotten"))), num_workers=2)))
    text = str(caught.value)
    assert "in DataLoader worker process 1" in text  # the second worker reads batch 3
    assert "shard_loader: the data set failed to give sample 13" in text
    assert caught.value.__notes__ == ["shard_loader: batch 3 of epoch 1"]


def test_an_error_that_cannot_be_made_again_is_raised_as_text():
    with pytest.raises(RuntimeError, match="TwoWordsError") as caught:
        ids(loader_of(Failing(5, raising(TwoWordsError("a", "b"))), num_workers=1))
    assert "failed to give sample 5" in str(caught.value)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_that_stops_does_not_end_the_epoch(num_workers):
    """A loop takes StopIteration for the end, so torch's own loader silently loses the rest."""
    with pytest.raises(RuntimeError):
        ids(loader_of(Failing(5, raising(StopIteration("early"))), num_workers=num_workers))


def no_shared_memory(index):
    signal.signal(signal.SIGBUS, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGBUS)


@pytest.mark.parametrize(
    ("act", "ending", "hint"),
    [
        (killed, "killed by SIGKILL", r"was there memory enough\? fewer workers take less"),
        (no_shared_memory, "killed by SIGBUS", r"was there room in /dev/shm\? fewer workers .*"),
        (lambda index: os._exit(7), "ended with exit code 7", "num_workers=0 shows where it .*"),
    ],
    ids=["killed", "no shared memory", "left"],
)
def test_error_for_a_lost_worker_names_its_end_and_its_sample(act, ending, hint):
    with pytest.raises(WorkerError) as caught:
        ids(loader_of(Failing(13, act), num_workers=2, persistent=True))
    assert re.fullmatch(
        r"shard_loader: workers must live until the loop ends, got worker 1 \(process \d+\) "
        rf"{ending} in sample 13 of batch 3 of epoch 0 while batch [0-3] of epoch 0 was waited for; "
        rf"{hint}",
        str(caught.value),
    )
    assert isinstance(caught.value, RuntimeError)
    assert not processes()  # although the error is still held


def test_a_worker_that_dies_while_others_are_given_work_is_an_error_of_ours():
    """Torch may notice it first, and its error names no sample."""
    ours = r"worker 0 \(process \d+\) killed by SIGKILL in sample 0 of batch 0"
    torchs = r"DataLoader worker \(pid \d+\) is killed by signal: Killed"
    with pytest.raises(WorkerError, match=rf"got ({ours}|{torchs})"):
        ids(loader_of(Failing(0, killed, 400), 2, batch_size=1, prefetch_factor=200))


def test_a_failure_leaves_no_cycle_that_would_keep_a_loader():
    loader = loader_of(Failing(13, raising(ValueError("rotten"))), 2, persistent=True)
    gone = weakref.ref(loader)
    gc.disable()
    try:
        try:
            ids(loader)
        except ValueError:
            del loader
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("ending", "persistent"), [("break", False), ("error", True)])
def test_a_loop_that_is_left_influences_nothing_later(ending, persistent):
    data = TensorDataset(torch.arange(40))
    loader = loader_of(
        data, 2, persistent, shuffle=True, collate_fn=lambda s: torch.stack([x for (x,) in s])
    )
    whole = ids(loader)
    with contextlib.suppress(ZeroDivisionError):
        for number, _ in enumerate(loader):
            if number == 2 and ending == "break":
                break
            if number == 2:
                1 / 0  # noqa: B018
    if not persistent:
        assert not processes()
    loader.set_epoch(0)
    assert ids(loader) == whole
    assert [ids(epoch) for epoch in loader.epochs(1)] == [whole]


def pid_of(index):
    return os.getpid()


def test_persistent_workers_end_with_their_loader():
    loader = loader_of(Failing(None, None), 2, persistent=True)
    gc.disable()
    try:
        ids(loader)
        assert len(processes()) == 2
        del loader
        assert not processes()
    finally:
        gc.enable()


def test_after_a_failure_there_are_new_workers(tmp_path):
    def fails_once(index):
        mended = tmp_path / "mended"
        if not mended.exists():
            mended.touch()
            raise ValueError("rotten")
        return index

    loader = loader_of(Failing(13, fails_once), 2, persistent=True)
    with pytest.raises(ValueError, match="rotten"):
        ids(loader)
    assert not processes()
    assert [index for batch in ids(loader) for index in batch] == list(range(24))


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_persistent_workers_that_died_while_idle_are_replaced(kind):
    """No error is raised in what the program does meanwhile."""
    data = Failing(0, pid_of) if kind == "map" else Pids()
    loader = loader_of(data, 1, persistent=True, batch_size=1)
    first = next(iter(loader)).item()
    os.kill(first, signal.SIGKILL)
    time.sleep(0.2)
    assert next(iter(loader)).item() not in (first, os.getpid())


class Pids(IterableDataset):
    """A data set whose samples hold the process that read them."""

    def __iter__(self):
        yield os.getpid()


class Counted(IterableDataset):
    """A stream over the numbers of a data set."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


WAYS = {
    "at once": (
        lambda data: loader_of(Together(data), 2),
        "in samples 36, 37, 38, 39 of batch 9 of epoch 0",
    ),
    "own sampler": (
        lambda data: loader_of(data, 2, sampler=list(range(len(data)))),
        "in sample 37 of batch 9 of epoch 0",
    ),
    "stream": (lambda data: loader_of(Counted(data), 2), r"in batch (9|10) of epoch 0"),
}


class Together(Dataset):
    """A data set that is asked for all samples of a batch in one call."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitems__(self, indices):
        return [self.data[index] for index in indices]


@pytest.mark.parametrize(
    ("way", "ahead", "work_s"),
    [
        ("at once", True, 0.0),
        ("own sampler", False, 0.02),
        ("stream", True, 0.0),
    ],
)
def test_a_killed_worker_is_raised_where_its_loop_waits_for_a_batch(way, ahead, work_s):
    """It is never raised while the loop works on a batch; it names worker, signal and sample."""
    make, where = WAYS[way]
    loader = make(Failing(37, killed, size=64))
    loader = af.prefetch(loader, af.DistState()) if ahead else loader
    batches, worked = iter(loader), True
    with pytest.raises(WorkerError) as caught:  # noqa: PT012  # the test is where in it
        while True:
            batch = next(batches)
            worked = False
            end = time.monotonic() + work_s
            while time.monotonic() < end:
                batch.sum()
            worked = True
    assert worked
    text = str(caught.value)
    assert re.search(rf"worker [01] \(process \d+\) killed by SIGKILL {where}", text)
    with_notes = text + "".join(getattr(caught.value, "__notes__", []))
    assert re.search(r"batch \d+ of epoch 0 (was waited for|on rank 0)", with_notes)


class Big(Failing):
    """A data set with batches too large for a pipe, so that a worker may die while it sends one."""

    def __getitem__(self, index):
        return "x" * 200_000 if super().__getitem__(index) is not None else ""


def test_a_worker_that_dies_in_the_middle_of_sending_is_raised():
    loader = loader_of(Big(9, killed), 1, batch_size=1, collate_fn=list, prefetch_factor=8)
    batches = iter(loader)
    next(batches)
    time.sleep(0.5)  # meanwhile the worker fills the pipe, reads on and dies
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        list(batches)
