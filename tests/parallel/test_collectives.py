"""Collectives return the same on all ranks, and all ranks raise where their arguments differ."""

import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

import accel_fn as af
from accel_fn.errors import PeerError
from accel_fn.testing import simulate

ALONE = af.DistState()
ONE = torch.ones(2)


def test_sums_of_integers_are_exact():
    big = 2**60 + 1

    def run(state):
        return af.reduce_sum({"python": big, "tensor": torch.tensor([big, state.rank])}, state)

    for found in simulate(run, world_size=2):
        assert found["python"] == 2 * big
        assert found["tensor"].tolist() == [2 * big, 1]


@pytest.mark.parametrize(
    "numbers", [(2**63 - 1, 1), (2**70, -3), (-(2**200), 2**200 + 1), (True, 5)]
)
def test_sums_of_python_integers_know_no_bounds(numbers):
    total = sum(numbers)
    found = simulate(lambda state: af.reduce_sum(numbers[state.rank], state), world_size=2)
    assert [(type(each), each) for each in found] == [(int, total)] * 2


ORDERS = {
    "columns first": lambda tensor: tensor.mT.contiguous().mT,
    "channels last": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
    "every other": lambda tensor: tensor.repeat_interleave(2, dim=-1)[..., ::2],
    "conjugated lazily": lambda tensor: torch.complex(tensor, -tensor).conj().imag,
}


@pytest.mark.parametrize("function", [af.reduce_sum, af.reduce_mean], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_ranks_may_hold_their_elements_in_any_order_in_memory(order, function):
    values = torch.arange(2 * 3 * 4 * 5).double().reshape(2, 3, 4, 5)

    def run(state):
        mine = order(values) if state.rank else values
        torch.testing.assert_close(mine, values, rtol=0, atol=0)
        return function(mine, state)

    expected = values * 2 if function is af.reduce_sum else values
    for found in simulate(run, world_size=2):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(1).expand(3), torch.ones(()), torch.ones(0, 3), torch.ones(1, 2).expand(2, 2)],
    ids=lambda tensor: f"{list(tensor.shape)} {tensor.stride()}",
)
def test_sums_have_the_shape_given(tensor):
    def run(state):
        return af.reduce_sum(tensor.clone() if state.rank else tensor, state)

    for found in simulate(run, world_size=2):
        torch.testing.assert_close(found, tensor.clone() * 2, rtol=0, atol=0)


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32]
DTYPES += [torch.float64, torch.complex64, torch.complex128]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_are_summed_and_broadcast(dtype):
    """Some backends refuse one of these dtypes, or treat it as another."""
    counts = torch.tensor([[1, 0, 2], [0, 0, 3], [1, 0, 1]])
    rows = counts.to(dtype)

    def run(state):
        mine = rows[state.rank]
        return af.reduce_sum(mine, state), af.broadcast(mine, state, source=1)

    expected = counts.sum(0).to(dtype), rows[1]
    for found in simulate(run, world_size=3):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.dtype == dtype
            assert mine.view(torch.uint8).tolist() == theirs.view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int16, torch.uint32, torch.uint64], ids=str)
def test_sums_of_integers_wrap_around_where_their_dtype_does(dtype):
    most = torch.iinfo(dtype).max

    def run(state):
        return af.reduce_sum(torch.tensor([most], dtype=dtype), state).item()

    bound = 2 ** torch.iinfo(dtype).bits
    total = 2 * most % bound
    assert simulate(run, world_size=2) == [total if total <= most else total - bound] * 2


def test_sparse_sums_are_sums():
    for found in simulate(
        lambda state: af.reduce_sum(torch.eye(2).to_sparse(), state), world_size=2
    ):
        assert found.to_dense().tolist() == [[2, 0], [0, 2]]


EXTREMES = {af.reduce_max: (max, torch.amax), af.reduce_min: (min, torch.amin)}
NUMBERS = {int: st.integers(), float: st.floats(allow_nan=False)}
ROWS = st.lists(st.floats(width=32), min_size=3, max_size=3)


@pytest.mark.parametrize("function", EXTREMES, ids=lambda fn: fn.__name__)
@given(data=st.data(), world_size=st.integers(2, 3))
def test_the_largest_and_the_smallest_are_those_of_the_stacked_ranks(function, data, world_size):
    of_numbers, of_tensors = EXTREMES[function]
    kind = data.draw(st.sampled_from([*NUMBERS]))
    numbers = [data.draw(NUMBERS[kind]) for _ in range(world_size)]
    rows = torch.tensor([data.draw(ROWS) for _ in range(world_size)], dtype=torch.float64)

    def run(state):
        return function({"number": numbers[state.rank], "row": rows[state.rank]}, state)

    for found in simulate(run, world_size=world_size):
        assert (type(found["number"]), found["number"]) == (kind, of_numbers(numbers))
        torch.testing.assert_close(
            found["row"], of_tensors(rows, 0), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("function", EXTREMES, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_number_that_is_none_is_the_largest_and_the_smallest(function, culprit):
    found = simulate(
        lambda state: function(math.nan if state.rank == culprit else 1.0, state), world_size=3
    )
    assert all(map(math.isnan, found))


@pytest.mark.parametrize(
    "dtype",
    [each for each in DTYPES if not each.is_complex and each != torch.uint64],
    ids=str,
)
def test_tensors_of_every_real_dtype_have_a_largest_and_a_smallest(dtype):
    rows = torch.tensor([[1, 0, 2], [0, 0, 3], [1, 0, 1]]).to(dtype)

    def run(state):
        mine = rows[state.rank]
        return af.reduce_max(mine, state), af.reduce_min(mine, state), af.reduce_max(mine[0], state)

    for found in simulate(run, world_size=3):
        assert {each.dtype for each in found} == {dtype}
        expected = [[1, 0, 3], [0, 0, 1], 1]
        assert [each.tolist() for each in found] == [
            torch.tensor(each).to(dtype).tolist() for each in expected
        ]


@pytest.mark.parametrize("function", EXTREMES, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        ("word", "hold real numbers and dense tensors of real numbers, none of uint64, got 'word'"),
        (torch.ones(1, dtype=torch.complex64), "hold real numbers and dense tensors"),
        (torch.ones(1, dtype=torch.uint64), "none of uint64"),
        (torch.eye(2).to_sparse(), "hold real numbers and dense tensors"),
        (
            torch.ones(2, requires_grad=True),
            r"hold no tensor with a graph, got a tensor \[2\] that requires grad; detach it",
        ),
    ],
    ids=["text", "complex", "uint64", "sparse", "graph"],
)
def test_what_has_no_order_is_refused_on_all_ranks(function, leaf, text):
    def run(state):
        error = PeerError if state.rank else ValueError
        with pytest.raises(error, match=f"{function.__name__}: tree must .*{text}"):
            function(1.0 if state.rank else leaf, state)
        return af.reduce_sum(1, state)

    assert simulate(run, world_size=2) == [2, 2]
    with pytest.raises(ValueError, match=f"{function.__name__}: tree must .*{text}"):
        function(leaf, ALONE)


def test_a_sum_leaves_its_argument_alone():
    def run(state):
        mine = torch.ones(2)
        af.reduce_sum(mine, state)
        return mine.tolist()

    assert simulate(run, world_size=3) == [[1.0, 1.0]] * 3


@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_a_weighted_mean_of_means_is_the_mean_of_all_items(weights):
    if not sum(weights):
        return
    items = torch.arange(float(sum(weights))).double()

    def run(state):
        start = sum(weights[: state.rank])
        mine = items[start : start + weights[state.rank]]
        mean = {"tensor": mine.mean(), "number": mine.mean().item()}  # 0/0 on a rank without rows
        return af.reduce_mean(mean, state, weight=weights[state.rank])

    for found in simulate(run, world_size=len(weights)):
        assert float(found["tensor"]) == pytest.approx(float(items.mean()), rel=1e-12)
        assert found["number"] == pytest.approx(float(items.mean()), rel=1e-12)


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (lambda rank: -rank, "not on rank 1, got -1"),
        (lambda rank: 0, r"> 0 on some rank, got \[0, 0\]"),
        (lambda rank: 1e308, r"have a finite sum over the ranks, got \[1e\+308, 1e\+308\]"),
        (lambda rank: None, "be a number, got None"),
    ],
)
def test_weights_of_a_mean_are_checked_on_every_rank(weight, text):
    def run(state):
        with pytest.raises(ValueError, match=f"reduce_mean: weight must .*{text}"):
            af.reduce_mean(1.0, state, weight=weight(state.rank))

    simulate(run, world_size=2)


@pytest.mark.parametrize(
    ("function", "tree", "text"),
    [
        (af.reduce_sum, lambda rank: torch.ones(1 + rank), "one shape and dtype a leaf"),
        (af.reduce_sum, lambda rank: 1 if rank else 1.0, "one shape and dtype a leaf"),
        (af.reduce_sum, lambda rank: "word", "hold numbers and tensors, got 'word'"),
        (
            af.reduce_sum,
            lambda rank: TwoTensor(ONE, ONE),
            "hold numbers and tensors, got TwoTensor",
        ),
        (
            af.reduce_sum,
            lambda rank: torch.eye(2).to_sparse() if rank else torch.eye(2),
            r"\[2, 2\] torch.sparse_coo",
        ),
        (
            af.reduce_mean,
            lambda rank: torch.ones(2).long(),
            "hold numbers and floating-point tensors, got tensor",
        ),
    ],
)
def test_what_cannot_be_reduced_is_refused_on_every_rank(function, tree, text):
    def run(state):
        with pytest.raises(ValueError, match=text):
            function(tree(state.rank), state)

    simulate(run, world_size=2)


WRONG_ON_ONE = {
    "a leaf that is no number": (af.reduce_sum, "word", {}, "tree must hold numbers and tensors"),
    "a leaf without a mean": (
        af.reduce_mean,
        ONE.long(),
        {},
        "tree must hold numbers and floating",
    ),
    "a weight": (af.reduce_mean, 1.0, {"weight": "1"}, "weight must be a number, got '1'"),
    "a source of no rank": (
        af.broadcast,
        1,
        {"source": 3},
        "source must be in 0 .. world_size - 1",
    ),
    "a source of no kind": (af.broadcast, 1, {"source": 1.0}, "source must be an integer >= 0"),
    "what cannot be called": (af.on_main, 3, {}, "fn must be a function, got 3"),
}
RIGHT = {af.on_main: lambda: 1}


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize(
    ("function", "argument", "options", "text"), WRONG_ON_ONE.values(), ids=WRONG_ON_ONE
)
def test_a_mistake_of_one_rank_is_raised_on_all(function, argument, options, text, culprit):
    def run(state):
        wrong = state.rank == culprit
        error = ValueError if wrong else PeerError
        told = "" if wrong else f"{function.__name__}: failed on rank {culprit}: .*"
        call = partial(function, argument, state, **options)
        if not wrong:
            call = partial(function, RIGHT.get(function, 1.0), state)
        with pytest.raises(error, match=f"{told}{function.__name__}: {re.escape(text)}"):
            call()
        return af.reduce_sum(1, state)  # no rank is out of step afterwards

    assert simulate(run, world_size=3) == [3, 3, 3]


def test_ranks_must_mean_the_same_source():
    def run(state):
        text = "broadcast: source must be the same on every rank, got 1 on rank 1 and 0 on rank 0"
        with pytest.raises(ValueError, match=text):
            af.broadcast(state.rank, state, source=state.rank)

    simulate(run, world_size=2)


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (lambda: 1, "hold tensors and what can be pickled .*lambda.*, got \\['function'\\]"),
        (torch.eye(2).to_sparse(), "hold dense tensors, got 'Tensor of layout torch.sparse_coo'"),
        (TwoTensor(ONE, ONE), "hold dense tensors, got 'TwoTensor"),
    ],
)
def test_what_the_source_cannot_send_is_raised_on_all(leaf, text):
    def run(state):
        with pytest.raises(PeerError if state.is_main else ValueError, match=text):
            af.broadcast(leaf, state, source=1)

    simulate(run, world_size=2)


CALLS = {
    "gather": lambda state: af.gather(state, ONE),
    "reduce_sum": lambda state: af.reduce_sum(state, ONE),
    "reduce_mean": lambda state: af.reduce_mean(state, ONE),
    "reduce_max": lambda state: af.reduce_max(state, ONE),
    "to_device": lambda state: af.extend.to_device(state, ONE),
    "broadcast": lambda state: af.broadcast(state, ONE),
    "on_main": lambda state: af.on_main(state, ONE),
    "barrier": lambda state: af.barrier(ONE),
    "any_rank": lambda state: af.any_rank(state, ONE),
    "main_first": lambda state: af.main_first(ONE).__enter__(),
    "print_on_main": lambda state: af.print_on_main("a", state=ONE),
    "main_logger": lambda state: af.main_logger(state, ONE),
    "seed_all": lambda state: af.seed_all(ONE),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_in_each_others_place_are_refused(name):
    with pytest.raises(TypeError, match=f"{name}: state must be a DistState, got 'Tensor'"):
        CALLS[name](ALONE)


@pytest.mark.parametrize("source", [0, 2])
def test_a_broadcast_gives_all_what_the_source_has(source):
    def run(state):
        tree = {"name": f"rank {state.rank}", "rows": torch.full((state.rank + 1, 2), state.rank)}
        return af.broadcast(tree, state, source=source)

    for found in simulate(run, world_size=3):
        assert found["name"] == f"rank {source}"
        assert found["rows"].tolist() == [[source, source]] * (source + 1)


TREE = {"rows": torch.arange(4), "number": 3}


@pytest.mark.parametrize(
    "function",
    [af.reduce_sum, af.reduce_mean, af.reduce_max, af.broadcast],
    ids=lambda fn: fn.__name__,
)
def test_a_world_of_one_gets_its_own_value(function):
    assert function(TREE, ALONE) is TREE


def test_a_world_of_one_waits_for_nobody_and_has_one_source():
    af.barrier(ALONE)
    text = r"broadcast: source must be in 0 \.\. world_size - 1 = 0, got 1"
    with pytest.raises(ValueError, match=text):
        af.broadcast(1, ALONE, source=1)


def test_a_barrier_waits_for_all():
    import threading
    import time

    came = []
    lock = threading.Lock()

    def run(state):
        time.sleep(0.05 * state.rank)
        with lock:
            came.append(state.rank)
        af.barrier(state)
        return len(came)

    assert simulate(run, world_size=3) == [3, 3, 3]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [((False, False, False), False), ((False, True, False), True), ((True, True, True), True)],
)
@pytest.mark.parametrize("kind", [bool, np.bool_, torch.tensor], ids=lambda kind: kind.__name__)
def test_a_flag_of_one_rank_is_seen_on_all(flags, expected, kind):
    found = simulate(lambda state: af.any_rank(kind(flags[state.rank]), state), world_size=3)
    assert [(type(each), each) for each in found] == [(bool, expected)] * 3
    assert af.any_rank(kind(flags[1]), ALONE) is flags[1]


@pytest.mark.parametrize("flag", [1, None, "yes", torch.ones(2).bool(), torch.ones(())], ids=repr)
def test_what_is_no_flag_is_refused_on_all_ranks(flag):
    def run(state):
        error = TypeError if state.is_main else PeerError
        text = (
            "flag must be True or False, got" if state.is_main else "failed on rank 0: its flag is"
        )
        with pytest.raises(error, match=f"^any_rank: {text}"):
            af.any_rank(flag if state.is_main else True, state)
        return af.reduce_sum(1, state)

    assert simulate(run, world_size=2) == [2, 2]
    with pytest.raises(TypeError, match="any_rank: flag must be True or False"):
        af.any_rank(flag, ALONE)
