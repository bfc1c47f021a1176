"""Sums as binary trees: in which order, to the bit."""

import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel_fn import _summing
from accel_fn._summing import Tree, sum_over_ranks
from accel_fn.testing import simulate

# Sums in another order differ, and so does -0.0 + 0.0 from -0.0.
NUMBERS = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, 1e30, -1e30, float("nan")])
LISTS = st.integers(0, 3).flatmap(
    lambda depth: st.lists(
        st.tuples(*[st.none() | st.tuples(NUMBERS, NUMBERS)] * 2),
        min_size=2**depth,
        max_size=2**depth,
    )
)


def tree_of(lists):
    """The definition: of the first half and the second, each summed likewise."""
    if len(lists) == 1:
        return lists[0]
    half = len(lists) // 2
    pairs = zip(tree_of(lists[:half]), tree_of(lists[half:]), strict=True)
    return [b if a is None else a if b is None else a + b for a, b in pairs]


def tensors_of(numbers):
    return [None if each is None else torch.tensor(each, dtype=torch.float32) for each in numbers]


def bits(tensors):
    """What is not a number has many forms, of which it is left open which one comes."""
    return [
        None
        if each is None
        else [struct.pack("d", number) if number == number else "nan" for number in each.tolist()]
        for each in tensors
    ]


def summed(lists):
    tree = Tree()
    for each in lists:
        tree.add(tensors_of(each))
    return tree.total()


@given(lists=LISTS)
def test_what_is_added_one_after_another_is_summed_as_a_tree(lists):
    assert bits(summed(lists)) == bits(tree_of([tensors_of(each) for each in lists]))


@settings(max_examples=25)
@given(lists=LISTS, depth=st.integers(0, 3))
@example(lists=[((-0.0, 0.0), None), (None, (-0.0, 1.0))], depth=1)
@example(lists=[(None, (1.0, 1.0)), (None, None)], depth=1)
def test_over_ranks_it_goes_on_as_the_same_tree(lists, depth):
    """However many of the lists are on one rank."""
    num_ranks = min(2**depth, len(lists))
    num_mine = len(lists) // num_ranks

    def run(state):
        mine = summed(lists[state.rank * num_mine :][:num_mine])
        return bits(sum_over_ranks(mine, [torch.zeros(2)] * 2, state))

    expected = bits(tree_of([tensors_of(each) for each in lists]))
    assert simulate(run, world_size=num_ranks) == [expected] * num_ranks


@pytest.mark.parametrize("bucket_bytes", [1, 64, 2**25])
def test_all_dtypes_shapes_and_layouts_are_summed_in_buckets_of_any_size(monkeypatch, bucket_bytes):
    monkeypatch.setattr(_summing, "_BUCKET_BYTES", bucket_bytes)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16]
    shapes = [(), (3,), (0,), (2, 5), (7, 3)]

    def make(rank):
        generator = torch.Generator().manual_seed(rank)
        found = [
            torch.randn(shape, generator=generator, dtype=dtype)
            for dtype in dtypes
            for shape in shapes
        ]
        return [
            *found,
            torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        ]

    def run(state):
        given = make(state.rank)
        found = sum_over_ranks([each.clone() for each in given], given, state)
        assert [each.stride() for each in found] == [each.stride() for each in given]
        return found

    expected = [(a + b) + (c + d) for a, b, c, d in zip(*map(make, range(4)), strict=True)]
    for found in simulate(run, world_size=4):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_as_many_sums_are_kept_as_a_tree_is_deep():
    tree, most = Tree(), 0
    for _ in range(64):
        tree.add([torch.ones(1)])
        most = max(most, len(tree._sums))
    assert most == 6
    assert tree.total()[0].item() == 64
