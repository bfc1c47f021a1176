"""Preemption: signals, contexts, threads and forks, and what is refused."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours


@pytest.mark.parametrize("recipe", [af.compose(), af.accumulate(2)], ids=["whole", "parts"])
def test_one_rank_reads_its_own_request(recipe):
    plan = recipe(ours.plan(optimizer=ours.adamw))
    batch = (torch.ones(4, 3).double(), torch.zeros(4, 1).double())
    with af.Preemption() as preemption:
        state, step = af.build(preemption(plan), af.DistState())
        state, report = step(state, batch)
        assert report.extras["stop"] is False
        os.kill(os.getpid(), signal.SIGUSR1)
        state, report = step(state, batch)
        assert report.extras["stop"] is True
    with pytest.raises(SystemExit) as left:
        preemption.leave()
    assert left.value.code == 75


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
            af.build(af.Preemption(())(plan) if state.rank else plan, state)

    simulate(run, world_size=2)


@pytest.mark.parametrize(
    "recipe",
    [af.wrap_ddp(), af.reproducible(num_virtual_ranks=2)],
    ids=["wrap_ddp", "reproducible"],
)
def test_a_request_that_fails_on_one_rank_is_raised_on_all(recipe):
    def run(state):
        def should_stop():
            if state.rank:
                raise ZeroDivisionError("of rank 1")
            return False

        state, step = ours.built(
            lambda plan: replace(recipe(plan), should_stop=(should_stop,)), state
        )
        batch = (torch.ones(1, 3).double(), torch.ones(1, 1).double())
        with pytest.raises((ValueError, ZeroDivisionError)) as caught:
            step(state, batch)
        return str(caught.value)

    other, own = simulate(run, world_size=2)
    assert own == "of rank 1"
    assert "another rank could not, see the error that it raised" in other


def test_explain_names_it():
    plan = af.Preemption(())(ours.plan(optimizer=ours.adamw))
    line = "  stop       after this step, if Preemption() requests it on any rank"
    assert line in af.explain(plan, af.DistState()).splitlines()
