"""What ranks say to each other: the same answer on all, and one verdict where they differ."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate

ALONE = af.DistState()


def test_sums_of_integers_are_exact():
    big = 2**60 + 1

    def run(state):
        return af.reduce_sum({"python": big, "tensor": torch.tensor([big, state.rank])}, state)

    for found in simulate(run, world_size=2):
        assert found["python"] == 2 * big
        assert found["tensor"].tolist() == [2 * big, 1]


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
        mean = {"tensor": mine.mean(), "number": mine.mean().item()}  # 0/0 where a rank has none
        return af.reduce_mean(mean, state, weight=weights[state.rank])

    for found in simulate(run, world_size=len(weights)):
        assert float(found["tensor"]) == pytest.approx(float(items.mean()), rel=1e-12)
        assert found["number"] == pytest.approx(float(items.mean()), rel=1e-12)


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (lambda rank: -rank, "not on rank 1, got -1"),
        (lambda rank: 0, r"> 0 on some rank, got \[0, 0\]"),
    ],
)
def test_weights_of_a_mean_are_checked_on_every_rank(weight, text):
    def run(state):
        with pytest.raises(ValueError, match=f"reduce_mean: weight must be .*{text}"):
            af.reduce_mean(1.0, state, weight=weight(state.rank))

    simulate(run, world_size=2)


@pytest.mark.parametrize(
    ("function", "tree", "text"),
    [
        (af.reduce_sum, lambda rank: torch.ones(1 + rank), "one shape and dtype a leaf"),
        (af.reduce_sum, lambda rank: 1 if rank else 1.0, "one shape and dtype a leaf"),
        (af.reduce_sum, lambda rank: "word", "hold numbers and tensors, got 'word'"),
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


@pytest.mark.parametrize("source", [0, 2])
def test_a_broadcast_gives_all_what_the_source_has(source):
    def run(state):
        tree = {"name": f"rank {state.rank}", "rows": torch.full((state.rank + 1, 2), state.rank)}
        return af.broadcast(tree, state, source=source)

    for found in simulate(run, world_size=3):
        assert found["name"] == f"rank {source}"
        assert found["rows"].tolist() == [[source, source]] * (source + 1)


def test_a_broadcast_needs_a_rank_of_this_world():
    with pytest.raises(
        ValueError, match=r"broadcast: source must be in 0 \.\. world_size - 1 = 0, got 1"
    ):
        af.broadcast(1, ALONE, source=1)


def test_main_alone_runs_and_all_get_what_it_gives():
    ran = []

    def run(state):
        def job():
            ran.append(state.rank)
            return {"folder": "runs/1"}

        return af.on_main(job, state)

    assert simulate(run, world_size=3) == [{"folder": "runs/1"}] * 3
    assert ran == [0]


def test_main_alone_raises_and_all_get_what_it_raised():
    def run(state):
        with pytest.raises(FileNotFoundError, match="no data"):
            af.on_main(lambda: Path("/no data").read_text(), state)
        return state.rank

    assert simulate(run, world_size=3) == [0, 1, 2]


class UnpicklableError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, first, second):
        super().__init__(first)


@pytest.mark.parametrize("world_size", [2])
def test_what_cannot_be_pickled_is_told_all_the_same(world_size):
    def failing():
        raise UnpicklableError("a", "b")

    def run(state):
        kind = UnpicklableError if state.is_main else RuntimeError
        with pytest.raises(kind, match="a"):
            af.on_main(failing, state)
        with pytest.raises(RuntimeError, match="fn must return or raise what can be pickled"):
            af.on_main(lambda: lambda: 1, state)

    simulate(run, world_size=world_size)


TREE = {"rows": torch.arange(4), "names": ["a"], "number": 3}


@pytest.mark.parametrize(
    "function", [af.reduce_sum, af.reduce_mean, af.broadcast], ids=lambda fn: fn.__name__
)
def test_a_world_of_one_hears_itself(function):
    assert function(TREE, ALONE) is TREE


def test_a_world_of_one_waits_for_nobody():
    af.barrier(ALONE)
    assert af.on_main(lambda: 5, ALONE) == 5


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
