"""A worker that is stopped, or killed while it holds a lock: a report, and no wait for ever."""

import os
import re
import signal
import sys
import threading
import time
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import accel_fn as af
from accel_fn.errors import WorkerError
from accel_fn.testing.internals import limited
from tests.cli.commands import run_python

STOPPED = (
    r"shard_loader: a batch should come soon, got none for more than \d+ s: worker \d \(process (\d+)\) is "
    r"stopped.*; kill -CONT \1 lets it go on"
)


class Numbers(Dataset):
    """Numbers, one of which does something else in the worker that reads it."""

    def __init__(self, at, act):
        self.at, self.act = at, act

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == self.at:
            self.act()
        return index


class Stream(Numbers, IterableDataset):
    def __iter__(self):
        yield from map(self.__getitem__, range(24))


def loader_of(act, data=Numbers, **options):
    options = {
        "multiprocessing_context": "fork",
        "num_workers": 2 if data is Numbers else 1,
        **options,
    }
    return af.shard_loader(DataLoader(data(5, act), batch_size=4, **options), af.DistState())


def stop():
    """Stop this process, as Ctrl-Z does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_with_lock():
    """Be killed like a worker that is about to send a batch: it holds the lock of the queue."""
    frame = sys._getframe()
    while "data_queue" not in frame.f_locals:
        frame = frame.f_back
    frame.f_locals["data_queue"]._wlock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))


def ids(loader):
    return torch.cat(list(loader)).tolist()


@pytest.mark.parametrize(("data", "persistent"), [(Numbers, False), (Stream, True)])
def test_a_stopped_worker_is_named_and_goes_on_with_all_its_samples(data, persistent, monkeypatch):
    warned = []

    def warn(text, *_, **__):
        if found := re.fullmatch(STOPPED, str(text)):
            warned.append(text)
            os.kill(int(found[1]), signal.SIGCONT)

    monkeypatch.setattr(warnings, "warn", warn)
    loader = loader_of(stop, data, persistent_workers=persistent)
    assert sorted(ids(loader)) == [*range(24)]
    assert len(warned) == 1
    assert ("of batch 1 of epoch 0" in warned[0]) == (data is Numbers)


def test_a_pass_over_a_stopped_worker_ends_at_once_when_it_is_left():
    started = time.monotonic()
    iterator = iter(loader_of(stop))
    next(iterator)
    with (
        pytest.warns(UserWarning, match=STOPPED),
        pytest.raises(KeyboardInterrupt),
        interrupted_in(1.0),
    ):
        next(iterator)
    del iterator
    assert (
        time.monotonic() < started + 4
    )  # torch alone: five seconds a worker, and for ever at exit


class interrupted_in:
    def __init__(self, delay_s):
        self.timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGUSR1))

    def __enter__(self):
        self.before = signal.signal(signal.SIGUSR1, self.stop)
        self.timer.start()

    def stop(self, number, frame):
        raise KeyboardInterrupt

    def __exit__(self, *error):
        self.timer.join()
        signal.signal(signal.SIGUSR1, self.before)


@pytest.mark.parametrize("data", [Numbers, Stream])
def test_a_worker_that_is_killed_with_the_lock_of_the_queue_is_an_error(data):
    with pytest.raises(WorkerError, match=r"worker \d \(process \d+\) killed by SIGKILL"):
        ids(loader_of(kill_with_lock, data))


def test_a_worker_that_lasts_is_named_with_what_it_reads():
    words = (
        r"got none for more than \d+ s: .*worker 1 \(process \d+\) reads in sample 5 of batch 1 of "
        r"epoch 0.*; "
        r"DataLoader\(timeout=...\) makes a long wait an error"
    )
    with (
        limited("report of a batch", 0.5),
        pytest.warns(UserWarning, match="a batch should come") as warned,
    ):
        assert ids(loader_of(lambda: time.sleep(1.5))) == [*range(24)]
    assert any(re.search(words, str(each.message)) for each in warned)


SCRIPT = """
import os, signal, warnings
import torch
from torch.utils.data import DataLoader, Dataset
import accel_fn as af

class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index

if __name__ == "__main__":
    loader = DataLoader(Data(), num_workers=1, persistent_workers=True)
    loader = af.shard_loader(loader, af.init())
    passes = iter(loader)
    next(passes)
    [worker] = __import__("multiprocessing").active_children()
    os.kill(worker.pid, signal.SIGSTOP)
    print("ends", flush=True)
"""


UNSEEN = """
from accel_fn.testing.internals import overlook_stopped_workers
overlook_stopped_workers()
"""


@pytest.mark.slow
@pytest.mark.parametrize("seen", [True, False], ids=["seen", "stopped after the last look"])
def test_a_program_with_a_stopped_worker_ends(tmp_path, seen):
    (tmp_path / "script.py").write_text(SCRIPT if seen else UNSEEN + SCRIPT)
    done = run_python(tmp_path, "script.py", timeout_s=120)  # it would wait for ever
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
