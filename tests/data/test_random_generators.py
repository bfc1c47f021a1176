"""Global generators that are borrowed go on afterwards as if nobody had drawn from them."""

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


@pytest.mark.parametrize("sizes", [(1, 4), (2, 3), (3, 1, 1), (5,)])
def test_normal_numbers_that_are_drawn_in_pieces_are_those_of_one(sizes):
    def pieces(counts):
        borrowed, found = Generators(7), []
        for count in counts:
            np.random.standard_normal()  # somebody else's
            with borrowed:
                found += [np.random.standard_normal() for _ in range(count)]
        return found

    assert pieces(sizes) == pieces([5])


def test_whole_states_are_restored():
    np.random.seed(3)
    np.random.standard_normal()
    before = np.random.get_state()
    with Generators(1):
        np.random.rand()
    after = np.random.get_state()
    assert before[1].tolist() == after[1].tolist()
    assert before[2:] == after[2:]
