"""Python calls and operations of a steady step, against those of the loop by hand that does the same job."""

import re
from functools import partial

import pytest
import torch

import accel_fn as af
from accel_fn.core import primitives
from accel_fn.testing import simulate
from accel_fn.testing.internals import num_calls
from tests.cli.commands import run_python
from tests.support.processes import ROOT
from tests.support.strategies import mse
from tests.tools.benchmarks import jobs, loops
from tests.tools.benchmarks.counting import count
from tests.tools.benchmarks.growing import SLOPES
from tests.tools.benchmarks.tasks import TINY, Scenario, Way, make_task

PAGE = (ROOT / "docs" / "how-cost-grows.md").read_text()
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


COUNT = """
from tests.tools.benchmarks import loops
from tests.tools.benchmarks.counting import count
from tests.tools.benchmarks.tasks import TINY, Scenario, Way, make_task

for loop in (loops.with_accel_fn, loops.by_hand):
    print(count(loop(make_task(Scenario(TINY, True, Way("plain")), 0))).calls)
"""


def test_a_plain_step_makes_the_calls_that_the_docs_say(tmp_path):
    """In a process of its own: hooks that other tests have left in torch would be counted."""
    ended = run_python(tmp_path, "-c", COUNT)
    assert ended.returncode == 0, ended.stderr
    said = re.findall(r"makes (\d+) calls where .* makes (\d+)", PAGE)[0]
    assert [*map(float, ended.stdout.split())] == [*map(float, said)]


def test_one_more_tensor_micro_batch_or_metric_adds_the_calls_that_the_docs_say():
    rows = dict(re.findall(r"^\| (\w[^|]*?) \| (\d+) \|$", PAGE, re.MULTILINE))
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


def messages_of(state, recipe, loss_fn=mse, *, num_steps=4, **given):
    """Return the number of collectives in each step, without checks."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    plan = af.Plan(loss_fn, model, torch.optim.AdamW(model.parameters()), **given)
    state, step = af.build(recipe(plan), state, checks=())
    found = []
    for _ in range(num_steps):
        before = num_calls()
        part = af.shard_batch((torch.ones(24, 4), torch.ones(24, 1)), state)
        state, _ = step(state, part)
        found.append(num_calls() - before)
    return found


@pytest.mark.parametrize(
    ("recipe", "messages"),
    [
        (af.wrap_ddp(), 1),
        (af.compose(af.wrap_ddp(), af.accumulate(4), af.clip(1.0), af.skip_nonfinite()), 1),
        (af.compose(af.wrap_ddp(), af.with_amp("fp16")), 2),
        (af.compose(af.wrap_ddp(), af.accumulate("auto")), 3),
        (af.compose(af.wrap_fsdp(), af.clip(1.0)), 3),
        (af.reproducible(8), 4),
        (af.local_sgd(10), 2),
    ],
    ids=["ddp", "ddp with others", "fp16", "auto", "fsdp", "reproducible", "local_sgd"],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_steady_step_sends_as_many_messages_as_the_docs_say(recipe, messages, world_size):
    found = simulate(lambda state: messages_of(state, recipe), world_size=world_size)[0]
    assert found[2:] == [messages] * 2


def test_an_average_of_local_sgd_sends_as_many_more_messages_as_the_docs_say():
    run = partial(messages_of, recipe=af.local_sgd(2), num_steps=6)
    assert simulate(run, world_size=2)[0][2:] == [2, 2 + 3] * 2


def in_terms(model, batch):
    loss = mse(model, batch)
    return {"first": loss, "second": loss.square()}


def as_sum(model, batch):
    return 24 * mse(model, batch), 24


@pytest.mark.parametrize(
    ("loss_fn", "given"),
    [
        (in_terms, {"weight_fn": {"first": af.count_samples, "second": af.count_samples}}),
        (as_sum, {}),
    ],
    ids=["several terms", "a sum and its count"],
)
def test_losses_that_need_a_weight_or_a_count_send_one_message_more(loss_fn, given):
    run = partial(messages_of, recipe=af.wrap_ddp(), loss_fn=loss_fn, **given)
    assert simulate(run, world_size=2)[0][2:] == [2, 2]


@pytest.mark.parametrize("num_metrics", [0, 1, 3])
def test_a_message_has_as_many_bytes_as_the_docs_say(num_metrics, monkeypatch):
    sizes, make = [], primitives._Heads.__init__

    def noting(heads, numbers, what, state, function):
        make(heads, numbers, what, state, function)
        sizes.append(len(heads._received) // state.world_size)

    def loss_fn(model, batch):
        loss = mse(model, batch)
        pairs = {f"metric {index}": (loss.detach(), 1) for index in range(num_metrics)}
        return (loss, pairs) if pairs else loss

    monkeypatch.setattr(primitives._Heads, "__init__", noting)
    simulate(partial(messages_of, recipe=af.wrap_ddp(), loss_fn=loss_fn), world_size=2)
    assert sizes[-1] == 64 + 8 * 2 * num_metrics


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
