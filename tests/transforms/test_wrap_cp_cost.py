"""What wrap_cp costs: messages and bytes of each layer, and the memory of activations."""

import json
from collections import Counter

import pytest

import accel_fn as af
from accel_fn.parallel.cp import attention
from accel_fn.testing import internals, simulate
from tests.support import long_sequences as long
from tests.support import strategies as ours
from tests.support.processes import launch

CUT = af.wrap_cp(long.DIMS)


def calls_of_a_step(state, depth, recipe=None):
    """Return the number of collectives in the third step, without checks."""
    model = long.long_model(depth=depth)
    plan = af.Plan(long.loss_fn, model, ours.sgd(model.parameters()), af.count_labels("labels"))
    state, step = af.build((recipe or af.compose(af.wrap_ddp(), CUT))(plan), state, checks=())
    batch = long.batches(2)[0]
    for _ in range(3):
        before = internals.num_calls()
        state, _ = step(state, batch)
        calls = internals.num_calls() - before
    return calls


def test_an_attention_sends_three_messages_and_a_micro_batch_one():
    def run(state):
        calls = [calls_of_a_step(state, depth) for depth in (1, 2, 4)]
        recipe = af.compose(af.wrap_ddp(), CUT, af.accumulate(2))
        return calls, calls_of_a_step(state, 1, recipe)

    for (one, two, four), accumulated in simulate(run, mesh={"cp": 2}):
        assert (two - one, four - two) == (3, 6)
        assert accumulated - one == 3 + 1


def test_an_attention_by_heads_sends_eight_messages():
    recipe = af.compose(af.wrap_ddp(), af.wrap_cp(long.DIMS, attention="ulysses"))

    def run(state):
        return [calls_of_a_step(state, depth, recipe) for depth in (1, 2)]

    for one, two in simulate(run, mesh={"cp": 2}):
        assert two - one == 4 + 4  # queries, keys, values and outputs, and their gradients


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_keys_and_values_travel_before_they_are_repeated(monkeypatch, num_ranks):
    sent = []

    def noting(name):
        plain = getattr(attention.primitives, name)

        def call(tensor, state, function):
            sent.append((name, tensor.numel()))
            return plain(tensor, state, function)

        return call

    for name in ("all_gather", "all_to_all"):
        monkeypatch.setattr(attention.primitives, name, noting(name))
    rows, length, width_of_keys = 2, 12, 8

    def run(state):
        model = long.long_model(depth=1)
        plan = af.Plan(long.loss_fn, model, ours.sgd(model.parameters()), af.count_labels("labels"))
        state, step = af.build(af.compose(af.wrap_ddp(), CUT)(plan), state, checks=())
        step(state, long.batches(rows, length=length)[0])

    simulate(run, mesh={"cp": num_ranks})
    of_whole = 2 * rows * length * width_of_keys
    gathers = [size for name, size in sent if name == "all_gather"]
    sums = [size for name, size in sent if name == "all_to_all"]
    assert gathers == [of_whole // num_ranks] * 2 * num_ranks  # in the forward and in the backward
    assert sums == [of_whole] * num_ranks


@pytest.mark.parametrize("length", [16, 2048])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_have_the_same_work_in_causal_attention(monkeypatch, num_ranks, length):
    work, plain = Counter(), attention._Call.attend

    def counting(call, query, keys, *rest):
        work[call.cp.rank] += query.shape[-2] * keys.shape[-2]
        return plain(call, query, keys, *rest)

    monkeypatch.setattr(attention._Call, "attend", counting)

    def run(state):
        model = long.long_model(depth=1)
        plan = af.Plan(long.loss_fn, model, ours.sgd(model.parameters()), af.count_labels("labels"))
        state, step = af.build(af.compose(af.wrap_ddp(), CUT)(plan), state, checks=())
        batch = long.batches(1, length=length)[0]
        step(state, {**batch, "position_ids": batch["position_ids"] % long.MAX_TOKENS})

    simulate(run, mesh={"cp": num_ranks})
    assert len(work) == num_ranks
    assert len({*work.values()}) == 1


MEMORY = """
import ctypes, json, re, sys, torch
from pathlib import Path
import accel_fn as af
from tests.support import long_sequences as long
from tests.support import strategies as ours

def resident():
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the allocator only keeps
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def loss_fn(model, batch):
    before = resident()
    loss, _ = long.loss_fn(model, batch)
    taken.append(resident() - before)
    return loss

taken = []
state = af.init(device="cpu", timeout_s=400, mesh={"dp": 1, "cp": -1})
model = long.long_model(depth=6).float()
plan = af.Plan(loss_fn, model, ours.sgd(model.parameters()), af.count_labels("labels"))
state, step = af.build(af.compose(af.wrap_ddp(), af.wrap_cp(long.DIMS))(plan), state, checks=())
batch = long.batches(1, length=8192)[0]
batch["position_ids"] = batch["position_ids"] % long.MAX_TOKENS
for _ in range(2):
    state, report = step(state, batch)
say(json.dumps([taken[-1], float(report.loss)]))
"""


@pytest.mark.slow
def test_four_ranks_hold_a_quarter_of_the_activations_each():
    (one,), every = (
        [json.loads(line) for line in launch(MEMORY, num_processes=number).splitlines()]
        for number in (1, 4)
    )
    for activations, loss in every:
        assert activations < 0.4 * one[0]
        assert loss == pytest.approx(one[1], rel=1e-5)
