"""prefetch gives the batches of the loader, in its order and at its positions, from a thread."""

import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import accel_fn as af
from accel_fn.testing.internals import limited
from tests.support.prefetch import (
    HERE,
    TWO_WORKERS,
    Counted,
    eventually,
    ids,
    of,
    readers,
)
from tests.support.waits import no_waiting

pytestmark = pytest.mark.usefixtures("no_reader_is_left")


def test_an_epoch_stays_an_epoch():
    epoch = next(of(11).epochs(2, since=replace(HERE, step=8)))
    ahead = af.prefetch(epoch, HERE)
    assert (ahead.index, ahead.first_batch, len(ahead)) == (1, 2, 4)
    assert ids(ahead) == ids(epoch)


@pytest.mark.parametrize(
    "make",
    [
        lambda: list(range(7)),
        lambda: DataLoader(torch.arange(7), batch_size=None),
        lambda: DataLoader(torch.arange(7), batch_size=None, **TWO_WORKERS),
    ],
    ids=["list", "DataLoader", "workers"],
)
def test_anything_can_be_read_ahead_and_more_than_once(make):
    ahead = af.prefetch(make(), HERE)
    for _ in range(2):
        assert [int(batch) for batch in ahead] == list(range(7))
    assert len(ahead) == 7


def test_an_iterator_is_read_once_and_has_no_length():
    ahead = af.prefetch(iter(range(3)), HERE)
    with pytest.raises(TypeError, match="has no len"):
        len(ahead)
    assert list(ahead) == [0, 1, 2]
    assert list(ahead) == []


def test_batches_are_moved_to_the_device():
    """The device is meta, which every machine has."""
    state = af.DistState(device="meta")
    batches = [
        {"x": torch.ones(2, 3), "names": ["a", "b"]},
        {"x": torch.ones(1, 3), "names": ["c"]},
    ]
    found = list(af.prefetch(batches, state))
    assert [(batch["x"].device.type, batch["names"]) for batch in found] == [
        ("meta", ["a", "b"]),
        ("meta", ["c"]),
    ]
    assert (
        af.extend.to_device(found[0], state)["x"] is found[0]["x"]
    )  # `place` has nothing left to copy


def test_on_a_cpu_nothing_is_copied():
    batches = [torch.ones(2), torch.zeros(3)]
    assert all(
        found is given for found, given in zip(af.prefetch(batches, HERE), batches, strict=True)
    )


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_than_depth_batches_are_read_ahead(depth):
    source = Counted(20)
    passed = iter(af.prefetch(source, HERE, depth))
    for taken in range(1, 15):
        next(passed)
        assert eventually(lambda taken=taken: source.num_read == taken + depth)
    time.sleep(0.05)
    assert source.num_read == 14 + depth
    del passed


def test_batches_are_read_while_the_loop_works_on_another():
    """Each side waits until the other is at the next batch, so reading in turns would time out."""
    both = threading.Barrier(2)

    def slowly():
        yield 0
        for number in range(1, 4):
            both.wait(timeout=100)
            yield number

    for batch in af.prefetch(slowly(), HERE, depth=1):
        if batch < 3:
            both.wait(timeout=100)


def test_nothing_starts_before_the_first_batch_is_requested():
    source = Counted(3)
    ahead = af.prefetch(source, HERE)
    passed = iter(ahead)
    time.sleep(0.02)
    assert (source.num_read, readers()) == (0, [])
    assert list(passed) == [0, 1, 2]


def test_a_batch_is_the_loops_alone():
    """The batch stays unchanged while the thread reads the next one."""
    dropped = threading.Event()

    def slowly():
        yield torch.ones(1)
        dropped.wait(timeout=100)
        yield torch.ones(1)

    passed = iter(af.prefetch(slowly(), HERE))
    alive = weakref.ref(next(passed))
    assert eventually(lambda: alive() is None)
    dropped.set()
    del passed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("options", [{}, {"pin_memory": True}, TWO_WORKERS])
def test_batches_come_on_an_accelerator_as_they_are(options):
    state = af.init()
    loader, same = (of(1000, 100, state, shuffle=True, **options) for _ in range(2))
    for _ in range(2):
        for found, expected in zip(af.prefetch(loader, state), same, strict=True):
            assert found[0].device == torch.empty(0, device=state.device).device
            assert af.extend.to_device(found[0], state) is found[0]
            assert found[0].tolist() == expected[0].tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_memory_of_a_batch_is_not_reused_before_the_loop_is_done_with_it():
    """The loop's stream is kept busy, and batches are dropped while work on them is queued."""
    state = af.init()
    batches = [torch.full((1 << 20,), float(number)) for number in range(32)]
    sums, device = [], torch.get_device_module()
    for batch in af.prefetch(batches, state):
        device._sleep(20_000_000)
        sums.append((batch * 1).sum())
        del batch
    assert [float(found) for found in sums] == [number * float(1 << 20) for number in range(32)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_the_host_does_not_wait_for_a_copy():
    state = af.init()
    batches = [torch.ones(1000) for _ in range(10)]
    list(af.prefetch(batches, state))
    with no_waiting():
        found = list(af.prefetch(batches, state))
    assert float(torch.stack(found).sum()) == 10_000


def test_a_batch_that_lasts_is_named_by_the_line_that_its_thread_is_at():
    def slow():
        yield 1
        time.sleep(0.5)  # this line
        yield 2

    text = r"got none for more than 0.1 s: its thread is at "
    with limited("report of a batch", 0.1), pytest.warns(UserWarning, match=text) as warned:
        assert list(af.prefetch(slow(), af.DistState())) == [1, 2]
    line = int(str(warned[0].message).rpartition(":")[2].split()[0])
    assert "# this line" in Path(__file__).read_text().splitlines()[line - 1]
