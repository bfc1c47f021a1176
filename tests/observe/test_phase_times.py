"""Phase times: what a trace shows of each phase, and which rank the others wait for."""

from hypothesis import given
from hypothesis import strategies as st

from accel_fn.observe.phase_times import (
    PHASES,
    PhaseTimes,
    length,
    minus,
    phase_times,
    table,
    union,
)

INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda pair: (pair[0], sum(pair)))
)


def points(intervals):
    return {point for begin, end in intervals for point in range(begin, end)}


@given(INTERVALS, INTERVALS)
def test_intervals_are_sets_of_points(first, second):
    left = minus(union(first), union(second))
    assert points(left) == points(first) - points(second)
    assert length(union(first)) == len(points(first))
    assert length(left) == len(points(left))


def event(name, begin, end, cat="user_annotation", tid=1, **args):
    """Make an event as torch writes it, in milliseconds."""
    times = {"ts": begin * 1e3, "dur": (end - begin) * 1e3}
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, "args": args, **times}


def ours(*ranges):
    return [event(f"accel_fn.{name}", begin, end) for name, begin, end in ranges]


def op(name, begin, end, **more):
    return event(name, begin, end, cat="cpu_op", **more)


def milliseconds(*events):
    """Return the times of the host and of the device that are not 0."""
    times = phase_times({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]})
    return [
        {phase: round(each * 1e3, 9) for phase, each in found.items() if each}
        for found in (times.host, times.device)
    ]


STEP = ours(("data", 0, 10), ("step 3", 10, 100), ("forward", 20, 40), ("backward", 40, 90))


def test_each_phase_has_its_own_time_and_the_rest_of_the_step_is_left():
    assert milliseconds(*STEP) == [{"data": 10, "forward": 20, "backward": 50, "rest": 20}, {}]


def test_times_are_of_one_step_and_of_one_gap_between_steps():
    events = ours(("step 1", 0, 10), ("data", 10, 14), ("step 2", 14, 20), ("forward", 1, 3))
    assert milliseconds(*events) == [{"data": 4, "forward": 1, "rest": 7}, {}]


def test_an_average_that_overlaps_with_the_backward_counts_where_nothing_else_runs():
    """The all-reduce is under way from 50 to 85; until 60, and from 65 to 70, the backward computes."""
    events = [
        op("aten::mm", 40, 60),
        op("aten::add", 65, 70),
        event("gloo:all_reduce", 50, 85, tid=7),
    ]
    found, _ = milliseconds(*STEP, *events)
    assert found == {"data": 10, "forward": 20, "backward": 30, "collectives": 20, "rest": 20}


def test_an_operation_that_waits_for_a_collective_inside_of_it_does_not_compute_meanwhile():
    events = [
        op("GatherBackward", 50, 85),
        op("c10d::allreduce_", 51, 52),
        op("aten::copy_", 80, 84),
        event("gloo:all_reduce", 51, 80, tid=7),
    ]
    found, _ = milliseconds(*STEP, *events)
    assert found["collectives"] == 29


def test_a_sum_that_began_before_the_forward_is_awaited_after_it():
    """Python code of the loss is no waiting, though the sum of weights is under way beside it."""
    events = ours(("step 3", 0, 50), ("forward", 10, 30), ("backward", 40, 50))
    sum_of_weights = event("gloo:all_to_all", 5, 38, tid=7)
    found, _ = milliseconds(*events, sum_of_weights)
    assert found == {"forward": 20, "backward": 10, "collectives": 13, "rest": 7}


def test_the_device_runs_what_was_launched_in_each_phase():
    """As CUDA's traces are: a kernel has the correlation of its launch, from whatever thread."""
    events = [
        event("cudaLaunchKernel", 25, 26, cat="cuda_runtime", correlation=1),
        event("gemm", 41, 61, cat="kernel", tid=7, correlation=1),
        event("cuLaunchKernelEx", 45, 46, cat="cuda_driver", tid=2, correlation=2),
        event("gemm_backward", 61, 80, cat="kernel", tid=7, correlation=2),
        event(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 75, 95, cat="kernel", tid=8, correlation=3
        ),
        event("cudaMemcpyAsync", 12, 13, cat="cuda_runtime", correlation=4),
        event("Memcpy HtoD", 13, 14, cat="gpu_memcpy", tid=7, correlation=4),
        event("accel_fn.forward", 41, 61, cat="gpu_user_annotation", tid=7),
    ]
    host, device = milliseconds(*STEP, *events)
    assert host == {"data": 10, "forward": 20, "backward": 50, "rest": 20}
    assert device == {"forward": 20, "backward": 19, "collectives": 15, "rest": 1}


def rank(*, device=None, **host):
    zeros = dict.fromkeys(PHASES, 0.0)
    return PhaseTimes(zeros | host, zeros | device if device else {})


def test_the_straggler_is_the_rank_that_waits_least_and_its_longest_phase_is_named():
    fast = rank(forward=0.010, backward=0.020, collectives=0.050, data=0.001)
    slow = rank(forward=0.055, backward=0.021, collectives=0.004, data=0.001)
    assert table({0: fast, 1: slow, 2: fast}, "heading").splitlines() == [
        "heading",
        "             data forward backward collectives  update  checks    rest    step",
        "rank 0        1.0    10.0     20.0        50.0     0.0     0.0     0.0    81.0",
        "rank 1        1.0    55.0     21.0         4.0     0.0     0.0     0.0    81.0",
        "rank 2        1.0    10.0     20.0        50.0     0.0     0.0     0.0    81.0",
        "rank 1 is the straggler: its forward takes 45.0 ms a step longer,",
        "and the other ranks wait 46.0 ms longer in collectives",
    ]


def test_ranks_that_wait_about_as_long_have_no_straggler():
    ranks = {0: rank(forward=0.9, collectives=0.1), 1: rank(forward=0.95, collectives=0.05)}
    assert table(ranks, "").endswith("no straggler: the ranks wait for each other about as long")


def test_waits_of_the_device_count_and_have_a_table_of_their_own():
    fast = rank(forward=0.1, device={"forward": 0.02, "collectives": 0.07})
    slow = rank(forward=0.1, device={"forward": 0.08, "collectives": 0.01})
    lines = table({0: fast, 1: slow}, "").splitlines()
    assert lines[4:7] == [
        "of which the device is at work, by the phase that launched it",
        "rank 0        0.0    20.0      0.0        70.0     0.0     0.0     0.0    90.0",
        "rank 1        0.0    80.0      0.0        10.0     0.0     0.0     0.0    90.0",
    ]
    assert lines[-2:] == [
        "rank 1 is the straggler: its forward takes 60.0 ms a step longer,",
        "and the other ranks wait 60.0 ms longer in collectives",
    ]


def test_a_table_fits_a_terminal():
    ranks = {number: rank(collectives=12.3, data=0.1 * (number == 511)) for number in range(512)}
    assert max(map(len, table(ranks, "").splitlines())) <= 80
