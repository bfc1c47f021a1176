"""Global generators that are borrowed go on afterwards as if nobody had drawn from them."""

import multiprocessing
import threading
import time

import numpy as np
import pytest

from accel_fn.data.random_generators import Generators


def drawn(count):
    """Return normal numbers, which NumPy draws in pairs, and whole ones."""
    return [np.random.standard_normal() for _ in range(count)] + [np.random.randint(1000)]


@pytest.mark.parametrize("before", [0, 1, 2, 3])
@pytest.mark.parametrize("inside", [0, 1, 2])
def test_normal_numbers_of_numpy_go_on(before, inside):
    np.random.seed(5)
    expected = [*drawn(before), *drawn(5)]
    np.random.seed(5)
    found = drawn(before)
    borrowed = Generators(1)
    for _ in range(2):
        with borrowed:
            drawn(inside)
    assert [*found, *drawn(5)] == expected


@pytest.mark.parametrize("sizes", [(1, 4), (2, 3)])
def test_normal_numbers_that_are_drawn_in_pieces_are_those_of_one(sizes):
    def pieces(counts):
        borrowed, found = Generators(7), []
        for count in counts:
            np.random.standard_normal()  # somebody else's
            with borrowed:
                found += [np.random.standard_normal() for _ in range(count)]
        return found

    assert pieces(sizes) == pieces([5])


def test_a_worker_may_be_forked_while_a_thread_reads():
    """The thread first restores the generators that it borrowed, since the worker never would."""
    entered = threading.Event()

    def borrow():
        with Generators(1):
            entered.set()
            time.sleep(0.2)

    def enter():
        with Generators(2):
            pass

    thread = threading.Thread(target=borrow)
    thread.start()
    entered.wait()
    worker = multiprocessing.get_context("fork").Process(target=enter, daemon=True)
    worker.start()
    worker.join(5)
    thread.join()
    assert worker.exitcode == 0
