"""Python calls and operations of a steady step, against those of the loop by hand that does the same job."""

from functools import partial

import pytest

import accel_fn as af
from tests.tools.benchmarks import jobs, loops
from tests.tools.benchmarks.counting import count
from tests.tools.benchmarks.tasks import TINY, Scenario, Way, make_task

PLAIN = Way("plain")
LOGGED = "log_to(every=50)"
WAYS = {
    "clip": Way("clip", max_norm=1.0),
    "bf16": Way("bf16", bf16=True),
    "accumulate(4)": Way("accumulate(4)", num_microbatches=4),
}


def counted(loop, way=PLAIN):
    """Count a steady update of the small model with a fused optimizer."""
    return count(loop(make_task(Scenario(TINY, True, way), 0)))


@pytest.mark.parametrize(
    ("name", "calls", "ops"),
    [
        ("plain", 1.05, 1.05),
        ("clip", 1.05, 1.05),
        ("bf16", 1.05, 1.05),
        ("accumulate(4)", 1.06, 1.05),  # each micro-batch makes six calls more
        ("schedule", 1.05, 1.05),
        ("ema", 1.05, 1.05),
        ("freeze", 1.05, 1.05),
        ("skip_nonfinite", 1.05, 1.05),
        ("skip_spikes", 1.05, 1.05),
        ("checkpoint_activations", 1.10, 1.05),
        (LOGGED, 1.06, 1.05),
    ],
)
def test_a_step_makes_as_few_calls_and_operations_as_the_loop_by_hand(name, calls, ops):
    if name in jobs.JOBS:
        by_hand, ours = jobs.JOBS[name]
    else:
        by_hand, ours = loops.by_hand, loops.with_accel_fn
    if name == LOGGED:
        ours = jobs.ours(lambda: af.log_to(jobs.new_log(), every=50))
    way = WAYS.get(name, PLAIN)
    expected, found = counted(by_hand, way), counted(ours, way)
    assert found.calls <= expected.calls * calls
    assert found.ops <= expected.ops * ops


@pytest.mark.parametrize(
    ("make", "num_calls", "num_ops"),
    [
        (partial(af.skip_nonfinite), 35, 5),
        (partial(af.skip_spikes), 35, 5),
        (partial(af.accumulate, "auto"), 12, 0),
        (partial(af.schedule, jobs.falling), 30, 0),
    ],
    ids=["skip_nonfinite", "skip_spikes", "auto", "schedule"],
)
def test_a_transform_adds_few_calls_and_operations_to_a_step(make, num_calls, num_ops):
    plain, found = counted(loops.with_accel_fn), counted(jobs.ours(make))
    assert found.calls - plain.calls <= num_calls
    assert found.ops - plain.ops <= num_ops
