"""Sums as binary trees have a defined order, to the bit."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from accel_fn.parallel.reproducible import tree_sum
from accel_fn.parallel.reproducible.tree_sum import Tree, sum_over_ranks
from accel_fn.testing import simulate, strategies


@st.composite
def lists_of_numbers(draw):
    """Draw numbers of many sizes, whose sum depends on the order; some are -0.0, and lists may lack
    one."""
    num_lists = 2 ** draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(strategies.seeds()))
    there = draw(st.lists(st.sampled_from([0, 1, 1, 2]), min_size=num_lists, max_size=num_lists))
    numbers = torch.randn(num_lists, 2, 5, generator=generator).exp()
    numbers = numbers - numbers.median()
    numbers[torch.rand(numbers.shape, generator=generator) < 0.2] = -0.0
    lacking = draw(st.sampled_from([0, 1]))
    return [
        [
            None if each == 0 or (each == 2 and place == lacking) else numbers[index, place]
            for place in (0, 1)
        ]
        for index, each in enumerate(there)
    ]


def tree_of(lists):
    """Define the sum: of the first half and the second, each summed likewise."""
    if len(lists) == 1:
        return lists[0]
    half = len(lists) // 2
    pairs = zip(tree_of(lists[:half]), tree_of(lists[half:]), strict=True)
    return [b if a is None else a if b is None else a + b for a, b in pairs]


def bits(tensors):
    return [None if each is None else each.numpy().tobytes() for each in tensors]


def summed(lists):
    tree = Tree()
    for each in lists:
        tree.add([None if tensor is None else tensor.clone() for tensor in each])
    return tree.total()


@given(lists=lists_of_numbers())
def test_what_is_added_one_after_another_is_summed_as_a_tree(lists):
    assert bits(summed(lists)) == bits(tree_of(lists))


@given(lists=lists_of_numbers(), depth=st.integers(0, 3))
@example(lists=[[torch.full((5,), -0.0), None], [None, None]], depth=1)
def test_over_ranks_it_continues_as_the_same_tree(lists, depth):
    """Any number of the lists may be on one rank."""
    num_ranks = min(2**depth, len(lists))
    num_mine = len(lists) // num_ranks

    def run(state):
        mine = summed(lists[state.rank * num_mine :][:num_mine])
        return bits(sum_over_ranks(mine, [torch.zeros(5)] * 2, state))

    expected = bits(tree_of(lists))
    assert simulate(run, world_size=num_ranks) == [expected] * num_ranks


@pytest.mark.parametrize("bucket_bytes", [1, 64, 2**25])
def test_all_dtypes_shapes_and_layouts_are_summed_in_buckets_of_any_size(monkeypatch, bucket_bytes):
    monkeypatch.setattr(tree_sum, "_BUCKET_BYTES", bucket_bytes)
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
