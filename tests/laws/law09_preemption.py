"""Preemption: a request on one rank reaches all ranks after the same step, and changes nothing
else."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

RECIPES = {
    "in the bucket": af.wrap_ddp(),
    "beside a hook": af.wrap_ddp(comm_hook="bf16"),
    "in shards": af.wrap_fsdp(),
    "micro-batches": af.compose(af.accumulate(3), af.wrap_ddp()),
    "a gradient function": lambda plan: replace(
        af.wrap_ddp()(plan), wrap_grad_fn=(lambda inner: lambda *given: inner(*given),)
    ),
}


def train(state, recipe, asked):
    """Train some steps; return each rank's stop flags, its number of collectives, and the parameters.

    `asked` is a set of (step, rank).
    """
    preemption = af.Preemption(())
    model = ours.regression_model()
    plan = af.Plan(ours.mse, model, ours.adamw(model.parameters()))
    listening = preemption if asked is not None else af.compose()
    state, step = af.build(state, af.compose(recipe, listening)(plan))
    stops, counts = [], []
    for number in range(4):
        if (number, state.rank) in (asked or ()):
            preemption.ask()
        inputs = torch.full((state.rank * 2 % 5, 3), 0.1 * number + state.rank).double()
        before = state.group._get_sequence_number_for_group()
        state, report = step(state, (inputs, inputs[:, :1] + 1))  # rank 0 has no samples
        stops.append(report.extras.get("stop"))
        counts.append(state.group._get_sequence_number_for_group() - before)
    tensors = ours.whole(model.state_dict())
    return stops, counts, {name: value.clone() for name, value in tensors.items()}


@given(
    world_size=st.integers(2, 4),
    recipe=st.sampled_from(sorted(RECIPES)),
    asked=st.frozensets(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=2),
)
def test_all_ranks_learn_of_it_after_the_same_step_which_is_the_step_it_is(
    world_size, recipe, asked
):
    asked = {(number, rank) for number, rank in asked if rank < world_size}
    first = min((number for number, _ in asked), default=4)
    silent = simulate(lambda state: train(state, RECIPES[recipe], None), world_size=world_size)
    heard = simulate(lambda state: train(state, RECIPES[recipe], asked), world_size=world_size)
    for (_, num_collectives, expected), (stops, counts, found) in zip(silent, heard, strict=True):
        assert stops == [number >= first for number in range(4)]
        assert counts == num_collectives  # the flag travels in a collective that exists anyway
        assert min(counts) > 0
        ours.assert_identical(found, expected)


def test_without_it_a_report_has_no_entry_about_the_end():
    def run(state):
        return train(state, af.wrap_ddp(), None)[0]

    assert simulate(run, world_size=2) == [[None] * 4] * 2


@pytest.mark.parametrize("recipe", [af.compose(), af.accumulate(2)], ids=["whole", "parts"])
def test_one_rank_reads_its_own_request(recipe):
    plan = recipe(ours.plan(optimizer=ours.adamw))
    batch = (torch.ones(4, 3).double(), torch.zeros(4, 1).double())
    with af.Preemption() as preemption:
        state, step = af.build(af.DistState(), preemption(plan))
        state, report = step(state, batch)
        assert report.extras["stop"] is False
        os.kill(os.getpid(), signal.SIGUSR1)
        state, report = step(state, batch)
        assert report.extras["stop"] is True
    with pytest.raises(SystemExit) as left:
        preemption.leave()
    assert left.value.code == 75


# -- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_noted_inside_and_obeyed_again_outside(number):
    before = signal.getsignal(number)
    with af.Preemption() as preemption:
        assert not preemption.asked()
        os.kill(os.getpid(), number)
        assert preemption.asked()
    assert signal.getsignal(number) is before


def test_a_step_outside_of_with_is_refused():
    """Outside of `with`, a signal would end the process."""
    state, step = ours.built(af.Preemption(), optimizer=ours.adamw)
    with pytest.raises(ValueError, match="train inside `with preemption:`"):
        step(state, (torch.ones(4, 3).double(), torch.zeros(4, 1).double()))


def test_one_inside_itself_ends_with_the_outer_one():
    before = signal.getsignal(signal.SIGTERM)
    preemption = af.Preemption()
    with preemption, preemption:
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_fork_obeys():
    """A loader's worker must end on SIGTERM."""
    up, say_up = os.pipe()
    with af.Preemption():
        pid = os.fork()
        if pid == 0:
            os.write(say_up, b".")  # from here on, Python handles signals of this process
            time.sleep(5)
            os._exit(3)
        os.read(up, 1)
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("signals", "words"),
    [
        ((15,), "Preemption: signals must be signals, such as signal.SIGTERM, got 15"),
        ((signal.SIGKILL,), "Preemption: signals must be some that a process can catch"),
    ],
)
def test_what_is_no_signal_to_be_caught_is_refused(signals, words):
    with pytest.raises(ValueError, match=words):
        af.Preemption(signals)


def test_another_thread_gets_an_error_since_it_handles_no_signals():
    with (
        ThreadPoolExecutor() as pool,
        pytest.raises(ValueError, match=r"must be \(\) outside of the main thread"),
    ):
        pool.submit(af.Preemption().__enter__).result()


def test_a_rank_that_does_not_listen_is_refused():
    def run(state):
        plan = af.wrap_ddp()(ours.plan(optimizer=ours.adamw))
        with pytest.raises(RuntimeError, match="should_stop"):
            af.build(state, af.Preemption(())(plan) if state.rank else plan)

    simulate(run, world_size=2)


def test_explain_names_it():
    plan = af.Preemption(())(ours.plan(optimizer=ours.adamw))
    line = "  stop       after this step, if Preemption() requests it on any rank"
    assert line in af.explain(plan, af.DistState()).splitlines()
