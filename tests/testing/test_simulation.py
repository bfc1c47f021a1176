"""simulate: ranks that fail keep neither other ranks nor the next simulation waiting."""

import contextlib
import copy
import gc
import math
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accel_fn as af
from accel_fn.testing import assert_equivalent, internals, simulate
from tests.support import strategies as ours
from tests.support.forked_ranks import run_worlds


def test_every_rank_has_a_state_of_its_own():
    states = simulate(lambda state: state, world_size=3, seed=4)
    assert [state.rank for state in states] == [0, 1, 2]
    assert {(state.world_size, state.local_world_size, state.seed) for state in states} == {
        (3, 3, 4)
    }


@pytest.mark.parametrize("culprit", [0, 2])
def test_the_first_error_of_any_rank_is_raised_with_its_rank(culprit):
    def run(state):
        if state.rank == culprit:
            raise KeyError("broken")
        af.barrier(state)

    start = time.monotonic()
    with pytest.raises(KeyError, match="broken") as caught:
        simulate(run, world_size=3, timeout_s=200)
    assert caught.value.__notes__ == [f"on simulated rank {culprit} of 3"]
    # the other rank sleeps for 200 s, and the simulation did not wait
    assert time.monotonic() - start < 100


def test_a_failed_world_is_not_used_again():
    def failing(state):
        if state.is_main:
            raise ValueError("once")
        return af.reduce_sum(1, state)

    for _ in range(5):
        with pytest.raises(ValueError, match="once"):
            simulate(failing, world_size=2)
        assert simulate(lambda state: af.reduce_sum(1, state), world_size=2) == [2, 2]


@pytest.mark.parametrize(("alone", "late_s"), [(0, None), (1, 0.6)], ids=["never", "late"])
def test_a_world_that_ran_out_of_time_is_not_used_again_though_nobody_raised(alone, late_s):
    """The other rank does not come, or comes too late."""

    def miss(state):
        if state.rank != alone and late_s:
            time.sleep(late_s)
        if state.rank == alone or late_s:
            with contextlib.suppress(RuntimeError):
                af.barrier(state)
        return state.group

    def meet(state):
        return state.group, af.reduce_sum(1, state)

    lost = simulate(miss, world_size=2, timeout_s=0.3)
    groups, sums = zip(*simulate(meet, world_size=2, timeout_s=0.3), strict=True)
    assert sums == (2, 2)
    assert set(groups).isdisjoint(lost)


def test_a_missing_rank_is_waited_for_no_longer_than_the_timeout():
    def run(state):
        return None if state.is_main else af.reduce_sum(1, state)

    start = time.monotonic()
    with pytest.raises(Exception, match=r"(?i)timed out|timeout|connection closed"):
        simulate(run, world_size=2, timeout_s=1)
    assert time.monotonic() - start < 8


@pytest.mark.parametrize(
    "where", [pytest.param("the world", marks=pytest.mark.slow), "a part of a mesh"]
)
def test_ranks_of_a_failed_world_end_long_before_their_collectives_time_out(where):
    others, ended = threading.enumerate(), queue.SimpleQueue()

    def run(state):
        group = (state.along("tp") if where == "a part of a mesh" else state).group
        if state.is_main:
            raise KeyError("broken")
        for _ in range(2):  # the second fails at once
            with contextlib.suppress(RuntimeError):
                group.allreduce([torch.ones(1)]).wait()
        ended.put(state.rank)

    with pytest.raises(KeyError, match="broken"):
        simulate(run, mesh={"dp": 2, "tp": 2}, timeout_s=200)
    for thread in set(threading.enumerate()) - set(others):
        thread.join(60)
        assert not thread.is_alive()
    assert {ended.get() for _ in range(3)} == {1, 2, 3}


def test_worlds_that_failed_are_not_many_at_a_time():
    """Each failed world keeps sockets open until its ranks have timed out."""
    others = threading.enumerate()

    def run(state):
        if state.is_main:
            raise KeyError("broken")
        af.barrier(state)

    with internals.simulations_apart(max_lost_sockets=8):
        for _ in range(4):
            with pytest.raises(KeyError):
                simulate(run, world_size=2, timeout_s=0.3)
            waiting = [each for each in threading.enumerate() if each not in others]
            # two failed worlds before, and this one
            assert sum(each.name == "rank 1 of 2" for each in waiting) <= 3


def num_files():
    return len(os.listdir("/proc/self/fd"))


OTHER_WORLDS = {
    "time-outs": lambda turn: {"world_size": 4, "timeout_s": 10.0 + turn},
    "shapes": lambda turn: {"mesh": {"dp": 2, ("pp", "cp", "tp")[turn % 3]: 2}},
    "meshes made in one world": lambda turn: {"world_size": 4},
}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files of Linux")
@pytest.mark.parametrize("other", OTHER_WORLDS)
def test_worlds_that_wait_hold_few_files(other):
    """The limit of open files is often 1024; a property over sizes and meshes makes many worlds."""
    counts = []
    with internals.simulations_apart(max_idle_sockets=0):
        for turn in range(3):
            simulate(lambda state: af.device_mesh(state) is None, **OTHER_WORLDS[other](turn))
            counts.append(num_files())
    assert max(counts) == min(counts)


def test_a_rank_that_outlives_its_simulation_may_simulate():
    """The rank is among the threads to be joined, and cannot join itself."""
    has_failed, found = threading.Event(), queue.SimpleQueue()

    def run(state):
        if state.is_main:
            raise KeyError("broken")
        has_failed.wait(60)
        found.put(simulate(lambda inner: af.reduce_sum(1, inner), world_size=2, timeout_s=7.5))

    with internals.simulations_apart(max_lost_sockets=0):
        with pytest.raises(KeyError):
            simulate(run, world_size=2)
        has_failed.set()
        assert found.get(timeout=60) == [2, 2]


def test_what_recovers_a_world_that_ran_out_of_time_is_joined_at_exit():
    def miss(state):
        if not state.is_main:
            with contextlib.suppress(RuntimeError):
                af.barrier(state)

    with internals.simulations_apart():
        others = threading.enumerate()
        simulate(miss, world_size=2, timeout_s=0.2)
        assert set(threading.enumerate()) - set(others)
    assert not set(threading.enumerate()) - set(others)


@pytest.mark.slow
def test_ranks_that_still_wait_when_python_ends_do_not_abort_it(tmp_path):
    """They time out in the background, and need the interpreter for that."""
    script = """
        import accel_fn as af
        from accel_fn.testing import simulate

        def run(state):
            if state.is_main:
                raise KeyError("broken")
            af.barrier(state)

        {call}
    """
    calls = {
        "raised": "simulate(run, world_size=4, timeout_s=0.2)",
        "caught": """try:
            simulate(run, world_size=4, timeout_s=0.2)
        except KeyError:
            pass""",
    }
    scripts = {name: script.format(call=call) for name, call in calls.items()}
    ended = run_worlds(scripts, tmp_path, num_processes=1)
    assert {name: ranks[0].exit_code for name, ranks in ended.items()} == {"raised": 1, "caught": 0}
    assert ended["caught"][0].stderr == ""
    assert ended["raised"][0].stderr.endswith("KeyError: 'broken'\non simulated rank 0 of 4\n")


@pytest.mark.slow
def test_a_thousand_simulations_neither_hang_nor_leak_threads():
    simulate(af.barrier, world_size=2)
    simulate(af.barrier, world_size=3)
    before = threading.active_count()
    for turn in range(1000):
        size = 2 + turn % 2
        assert (
            simulate(lambda state: af.reduce_sum(state.rank, state), world_size=size)[0]
            == size * (size - 1) // 2
        )
    assert threading.active_count() <= before


def num_threads():
    """Count the threads of the operating system, since Python does not list Gloo's."""
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads of Linux")
@pytest.mark.parametrize("hangs", [False, True])
def test_failed_simulations_leave_no_threads(hangs):
    """A world that fails on all ranks is reused; any other ends after its time-out."""

    def fail(state):
        if state.is_main or not hangs:
            raise ZeroDivisionError
        af.barrier(state)

    def failed():
        with pytest.raises(ZeroDivisionError):
            simulate(fail, world_size=2, timeout_s=0.3)

    failed()
    before = num_threads()
    for _ in range(5):
        failed()
    gc.collect()
    deadline = time.monotonic() + 20
    while num_threads() > before and time.monotonic() < deadline:
        time.sleep(0.1)
        gc.collect()
    assert num_threads() <= before + 5  # the threads of one more world, kept for later


@pytest.mark.parametrize("num_rounds", [1, 3])
def test_ranks_that_seed_draw_numbers_of_their_own(num_rounds):
    """Without turns, the draws of one rank would come between the seed and the draws of another."""

    def run(state):
        models = []
        for seed in range(num_rounds):
            torch.manual_seed(seed)
            time.sleep(0.01 * state.rank)
            models.append(nn.Linear(50, 50).weight.detach().clone())
            time.sleep(0.01)
            models.append(torch.rand(3))
            af.barrier(state)
        return models

    expected = []
    for seed in range(num_rounds):
        torch.manual_seed(seed)
        expected += [nn.Linear(50, 50).weight.detach().clone(), torch.rand(3)]
    for found in simulate(run, world_size=4, timeout_s=30):
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs)


def test_a_process_that_a_rank_forks_seeds_as_any_other():
    """The fork has no threads, and a group of an earlier world would wait for them when it is
    released."""

    def failing(state):
        torch.manual_seed(0)
        af.barrier(state)
        if state.rank == 0:
            torch.manual_seed(0)
            raise ValueError("one alone")
        af.barrier(state)

    def forked(state):
        child = os.fork()
        if not child:
            torch.manual_seed(1)
            os._exit(0)
        return os.waitpid(child, 0)[1]

    threads = threading.active_count()
    with pytest.raises(ValueError, match="one alone"):
        simulate(failing, world_size=2, timeout_s=0.2)
    while threading.active_count() > threads:
        time.sleep(0.01)
    gc.collect()  # the error's frames hold the group too
    assert simulate(forked, world_size=2) == [0, 0]


@pytest.mark.slow
def test_a_rank_that_seeds_and_waits_for_another_one_keeps_none_waiting():
    """It waits in a way that no collective shows, so the other rank may seed all the same."""
    seeded = threading.Event()

    def run(state):
        if state.is_main:
            torch.manual_seed(0)
            assert seeded.wait(30)
        else:
            torch.manual_seed(1)
            seeded.set()
        return True

    assert simulate(run, world_size=2, timeout_s=60) == [True, True]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"world_size": 0}, "world_size must be an integer >= 1, got 0"),
        ({"world_size": 2, "timeout_s": -1}, "timeout_s must be a finite number > 0, got -1"),
        ({"world_size": 2, "seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"world_size": 2, "fn": 3}, "fn must be a function, got 3"),
    ],
)
def test_arguments_are_checked(arguments, text):
    with pytest.raises(ValueError, match=f"simulate: {text}"):
        simulate(**{"fn": af.barrier, **arguments})


def make_plan():
    return ours.plan(optimizer=ours.adamw)


BATCHES = [(torch.ones(n, 3).double() * n, torch.ones(n, 1).double()) for n in (5, 2, 1)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equivalent_plans_pass_in_any_world(world_size):
    plan = make_plan()
    before = {name: value.clone() for name, value in plan.model.state_dict().items()}
    assert_equivalent(
        plan,
        af.compose(af.wrap_ddp(), af.accumulate(2))(plan),
        BATCHES,
        world_sizes=(1, world_size),
    )
    ours.assert_identical(plan.model.state_dict(), before)


def test_plans_that_train_another_model_are_distinguished():
    plan = make_plan()
    with pytest.raises(
        AssertionError, match=r"0\.weight differs by up to .* after batch 0 on rank 0"
    ):
        assert_equivalent(plan, af.clip(1e-3)(plan), BATCHES)


@pytest.mark.filterwarnings("ignore:step. loss_fn should return the mean")
def test_plans_that_weigh_a_masked_loss_by_samples_are_distinguished():
    """The common mistake is a mean of means over tokens."""
    model = ours.token_model()
    batch = {
        "inputs": torch.ones(2, 3, 3).double(),
        "labels": torch.tensor([[1, -100, -100], [2, 0, 3]]),
    }
    batch["inputs"][1] *= -0.5
    right = af.Plan(
        ours.token_loss, model, ours.adamw(model.parameters()), af.count_labels("labels")
    )
    wrong = af.Plan(ours.token_loss, model, right.optimizer)
    assert_equivalent(right, af.accumulate(2)(right), [batch])
    with pytest.raises(AssertionError, match="must train the same model"):
        assert_equivalent(right, af.accumulate(2)(wrong), [batch])


@pytest.mark.parametrize("batches", [[], (), iter([])])
def test_without_batches_nothing_is_equivalent(batches):
    with pytest.raises(ValueError, match="assert_equivalent: batches must hold a batch, got"):
        assert_equivalent(make_plan(), make_plan(), batches)


@pytest.mark.parametrize("name", ["rtol", "atol"])
@pytest.mark.parametrize("value", [True, "0", None, -1e-9, math.nan, math.inf])
def test_a_tolerance_is_a_number(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a finite number >= 0, got"):
        assert_equivalent(make_plan(), make_plan(), BATCHES, **{name: value})


def spoiling(plan):
    """Make a plan that trains to nan."""
    return replace(plan, gradients=(lambda state, grads: grads.map(lambda g: g * torch.nan),))


@pytest.mark.parametrize(
    ("first", "second", "whose"),
    [(True, True, "plan_a and plan_b"), (True, False, "plan_a"), (False, True, "plan_b")],
)
def test_nan_is_reported_and_never_equal(first, second, whose):
    plans = [spoiling(make_plan()) if spoilt else make_plan() for spoilt in (first, second)]
    with pytest.raises(AssertionError, match=rf"0\.weight is nan with {whose} after batch 0"):
        assert_equivalent(*plans, BATCHES)


class Marked(nn.Module):
    """A model with buffers that are not finite floating-point numbers."""

    def __init__(self):
        super().__init__()
        self.inner = ours.regression_model()
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("seen", torch.tensor([False, True]))

    def forward(self, inputs):
        return self.inner(inputs)


def test_buffers_of_any_kind_are_compared():
    model = Marked()
    plan = af.Plan(ours.mse, model, ours.adamw(model.parameters()))
    assert_equivalent(plan, af.accumulate(2)(plan), BATCHES)
    for name, text in (("mask", "inf"), ("seen", "1")):
        other = copy.deepcopy(model)
        other.get_buffer(name)[0] = 1 if name == "seen" else -torch.inf
        another = replace(plan, model=other, optimizer=ours.adamw(other.parameters()))
        with pytest.raises(AssertionError, match=f"{name} differs by up to {text} after"):
            assert_equivalent(plan, another, BATCHES)


def test_models_of_other_parameters_are_not_compared():
    other = ours.plan(model=nn.Linear(3, 1).double(), optimizer=ours.adamw)
    with pytest.raises(ValueError, match=r"same parameters and buffers, got 0\.bias \[5\]"):
        assert_equivalent(make_plan(), other, BATCHES)


_SHORT = """
import accel_fn as af
from accel_fn.testing import simulate
simulate(lambda state: af.reduce_sum(state.rank, state), world_size=3)
"""


@pytest.mark.slow
def test_a_program_may_end_right_after_a_simulation():
    """Without a rest, a thread of Gloo that releases a tensor aborts one such program of seven."""
    ends = [subprocess.run([sys.executable, "-c", _SHORT], check=False) for _ in range(24)]
    assert [each.returncode for each in ends] == [0] * 24


@pytest.mark.parametrize("is_broken", [False, True], ids=["returns", "raises"])
def test_models_of_ranks_are_freed_after_forwards_of_ddp_that_overlap(is_broken):
    """The forward of rank 0 begins first and ends first."""
    alive, inside = [], [threading.Event(), threading.Event()]
    ended = threading.Event()

    class Overlapping(nn.Linear):
        def forward(self, inputs):
            inside[self.rank].set()
            (inside[1] if self.rank == 0 else ended).wait(5)
            return super().forward(inputs)

    def run(state):
        model = Overlapping(2, 1)
        model.rank = state.rank
        alive.append(weakref.ref(model))
        replica = DistributedDataParallel(model, process_group=state.group)
        if state.rank == 1:
            inside[0].wait(5)
        replica(torch.ones(1, 2))
        ended.set()
        if is_broken:
            raise KeyError("broken")

    with pytest.raises(KeyError) if is_broken else contextlib.nullcontext():
        simulate(run, world_size=2)
    deadline = time.monotonic() + 5
    while any(each() for each in alive) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert [each() for each in alive] == [None, None]
