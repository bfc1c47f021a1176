"""Python calls and operations of a steady step, against those of the loop by hand that does the same job."""

import re
from functools import partial

import pytest
import torch

import accel_fn as af
from accel_fn.testing import simulate
from accel_fn.testing.internals import num_calls
from tests.support.processes import ROOT
from tests.support.strategies import mse
from tests.tools.benchmarks import jobs, loops
from tests.tools.benchmarks.counting import count
from tests.tools.benchmarks.growing import SLOPES
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
        ("accumulate(4)", 1.10, 1.05),  # each micro-batch makes six calls more
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


def test_one_more_tensor_micro_batch_or_metric_adds_the_calls_that_the_docs_say():
    page = (ROOT / "docs" / "how-cost-grows.md").read_text()
    rows = dict(re.findall(r"^\| (\w[^|]*?) \| (\d+) \|$", page, re.MULTILINE))
    said = {
        "a tensor, by hand": rows["tensor, by hand (fused AdamW)"],
        "a tensor": rows["tensor"],
        "a tensor, with clip": rows["tensor, with `clip`"],
        "a tensor, with ema": rows["tensor, with `ema`"],
        "a micro-batch": rows["micro-batch"],
        "a metric": rows["metric"],
        "a metric in each of 8 micro-batches": rows["metric, in each of 8 micro-batches"],
    }
    assert {name: f"{measure():.0f}" for name, measure in SLOPES.items()} == said


@pytest.mark.parametrize(
    ("recipe", "messages"),
    [
        (af.wrap_ddp(), 1),
        (af.compose(af.wrap_ddp(), af.accumulate(4), af.clip(1.0), af.skip_nonfinite()), 1),
        (af.compose(af.wrap_ddp(), af.accumulate("auto")), 3),
        (af.wrap_fsdp(), 3),
        (af.reproducible(8), 4),
        (af.local_sgd(10), 2),
    ],
    ids=["ddp", "ddp with others", "auto", "fsdp", "reproducible", "local_sgd"],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_steady_step_sends_as_many_messages_as_the_docs_say(recipe, messages, world_size):
    def run(state):
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        plan = af.Plan(mse, model, torch.optim.AdamW(model.parameters()))
        state, step = af.build(recipe(plan), state, checks=())
        found = []
        for _ in range(4):
            before = num_calls()
            part = af.shard_batch((torch.ones(24, 4), torch.ones(24, 1)), state)
            state, _ = step(state, part)
            found.append(num_calls() - before)
        return found[2:]

    assert simulate(run, world_size=world_size)[0] == [messages] * 2


@pytest.mark.parametrize("wrap", [af.wrap_ddp(), af.wrap_fsdp()], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_checkpoint_has_as_many_files_as_the_docs_say(wrap, world_size, tmp_path):
    def run(state):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
        plan = af.Plan(mse, model, torch.optim.AdamW(model.parameters()))
        state, step = af.build(wrap(plan), state, checks=())
        state, _ = step(state, (torch.ones(8, 64), torch.ones(8, 1)))
        af.save(step, state, tmp_path)

    simulate(run, world_size=world_size)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2 * world_size + 3
