"""Law 9: a run that stops anywhere and resumes at any world size equals one that does not stop."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import accel_fn as af
from accel_fn.testing import internals, simulate
from tests import reference
from tests.laws.law07_scaling import scaled
from tests.support import strategies as ours


def batch_of(index: int, *, is_spoilt: bool):
    """Make a global batch of any size; one of four ranks may get nothing, and a spoilt one
    overflows on the last."""
    generator = torch.Generator().manual_seed(index)
    inputs = torch.randn(3 + index % 4, 3, generator=generator).double()
    targets = torch.randn(len(inputs), 1, generator=generator).double()
    if is_spoilt:
        inputs[-1] = float("nan")
    return inputs, targets


def part(batch, state):
    """Cut as evenly as possible, with the larger parts on the last ranks."""
    cuts = [len(batch[0]) * rank // state.world_size for rank in range(state.world_size + 1)]
    return ours.rows(batch, cuts[state.rank], cuts[state.rank + 1])


def copied(tensors):
    return {name: value.clone() for name, value in tensors.items()}


class Rank:
    """One rank of a run: its step and state."""

    def __init__(self, state, wrap, *, seed):
        plan = ours.plan(model=ours.regression_model(seed), optimizer=ours.adamw)
        recipe = af.compose(wrap, scaled(2.0**8), af.accumulate(2), af.clip(0.5))
        self.state, self.step = af.build(recipe(plan), state)

    def load(self, folder):
        self.state = af.load(self.step, self.state, folder)

    def save(self, folder, *, wait):
        af.save(self.step, self.state, folder, keep=2, wait=wait)

    def finish(self):
        internals.finish_saving(self.state, self.step)

    def train(self, batch):
        """Train on a batch; return the loss, to the bit."""
        self.state, report = self.step(self.state, part(batch, self.state))
        return float(report.loss).hex()

    def parameters(self):
        return copied(ours.whole(self.step.plan.model.state_dict()))


class World:
    """Simulated ranks that live until they are killed, and run functions in between."""

    def __init__(self, kind, *, seed):
        world_size, sharded = kind
        self._asked = [SimpleQueue() for _ in range(world_size)]
        self._said = [SimpleQueue() for _ in range(world_size)]
        wrap = af.wrap_fsdp() if sharded else af.wrap_ddp()

        def live(state):
            rank = None
            while (ask := self._asked[state.rank].get()) is not None:
                try:
                    rank = rank or Rank(state, wrap, seed=seed)
                    self._said[state.rank].put((ask(rank), None))
                except Exception as error:
                    self._said[state.rank].put((None, error))

        self._thread = Thread(target=lambda: simulate(live, world_size=world_size), daemon=True)
        self._thread.start()

    def each(self, ask: Callable[[Rank], object]):
        """Call a function on every rank; return the results in rank order."""
        for asked in self._asked:
            asked.put(ask)
        answers, errors = zip(*[said.get() for said in self._said], strict=True)
        for error in filter(None, errors):
            raise error
        return answers

    def kill(self):
        for asked in self._asked:
            asked.put(None)
        self._thread.join()
        gc.collect()  # errors keep ranks alive, and those keep the lock of their folder


WORLDS = st.tuples(st.integers(1, 4), st.booleans())
"""The number of ranks, and whether parameters and optimizer state are sharded."""


class Runs(RuleBasedStateMachine):
    """A state machine of runs over one folder. Each subclass defines how a run advances (`advance`)
    and how exactly two results must agree (`assert_equal`)."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.spoilt: set[int] = set()
        self.now = self.newest = 0
        self.world = World((1, False), seed=0)
        self.save(wait=True)
        self.expected = [(None, *self.world.each(Rank.parameters))]

    def check(self):
        """Assert that all ranks are at the expected position."""
        _, expected = self.expected[self.now]
        skipped = len([index for index in self.spoilt if index < self.now])
        for state, found in self.world.each(lambda rank: (rank.state, rank.parameters())):
            self.assert_equal(found, expected)
            assert state.step == self.now
            assert float(state.scaler.scale) == 2.0 ** (8 - skipped)
            assert int(state.scaler.skipped) == skipped

    def begin(self, kind):
        self.world = World(kind, seed=5)  # other values than the saved ones
        self.world.each(lambda rank: rank.load(self.folder.name))
        self.now = self.newest
        self.check()

    @rule(num_updates=st.integers(1, 3))
    def train(self, num_updates):
        for index in range(self.now, self.now + num_updates):
            batch = batch_of(index, is_spoilt=index in self.spoilt)
            if index + 1 == len(self.expected):
                self.expected.append(self.advance(batch))
            losses = self.world.each(lambda rank, batch=batch: rank.train(batch))
            self.now = index + 1
            self.check()
            assert self.expected[self.now][0] in (None, losses[0])

    @precondition(lambda self: len(self.expected) - 1 not in self.spoilt)
    @rule()
    def overflow(self):
        """Train on a batch that overflows."""
        self.spoilt.add(len(self.expected) - 1)

    @rule(wait=st.booleans())
    def save(self, wait):
        self.world.each(lambda rank: rank.save(self.folder.name, wait=wait))
        self.newest = self.now

    @rule(kind=WORLDS)
    def kill(self, kind):
        self.world.each(Rank.finish)  # the writing thread belongs to this process, which survives
        self.world.kill()
        self.begin(kind)

    @rule(num_files=st.integers(0, 20), wait=st.booleans(), kind=WORLDS)
    def kill_while_it_saves(self, num_files, wait, kind):
        """Kill the run during a save, or just after it if there are fewer files."""
        self.world.each(Rank.finish)  # this waits for the earlier save, which must not be killed
        before = self.newest
        try:
            with internals.saves_killed_after(num_files):
                self.save(wait)
                self.world.each(Rank.finish)
        except RuntimeError as error:
            if "killed" not in str(error):
                raise
            self.newest = before
        self.kill(kind)

    def teardown(self):
        self.world.each(Rank.finish)
        self.world.kill()
        self.folder.cleanup()


class RunsOfAnyWorlds(Runs):
    """Runs at any world sizes, compared with the loop by hand."""

    assert_equal = staticmethod(ours.assert_close)

    def __init__(self):
        super().__init__()
        self.model = ours.regression_model()
        self.optimizer = ours.adamw(self.model.parameters())

    def advance(self, batch):
        """Make an update; return the parameters."""
        if batch[0].isfinite().all():
            reference.train(self.model, ours.mse, self.optimizer, [batch], max_norm=0.5)
        return None, copied(self.model.state_dict())


class RunsOfOneWorld(Runs):
    """Runs of one world size, compared with a run that never stops."""

    assert_equal = staticmethod(ours.assert_identical)

    @initialize(kind=WORLDS)
    def choose(self, kind):
        self.kind = kind
        self.never_stopped = World(kind, seed=0)
        self.kill(kind)

    def advance(self, batch):
        """Make an update; return its loss too."""
        loss, *_ = self.never_stopped.each(lambda rank: rank.train(batch))
        parameters, *_ = self.never_stopped.each(Rank.parameters)
        return loss, parameters

    def begin(self, kind):
        super().begin(self.kind)

    def teardown(self):
        super().teardown()
        self.never_stopped.kill()


@pytest.mark.parametrize("runs", [RunsOfAnyWorlds, RunsOfOneWorld])
def test_runs_that_are_stopped_anywhere_are_one_that_is_not(runs):
    """Results equal the loop by hand to rounding; at one world size, also repeated losses are equal
    to the bit."""
    run_state_machine_as_test(runs, settings=settings(ours.share(0.2), stateful_step_count=6))


def test_runs_at_four_worlds_killed_in_two_saves_are_the_one_by_hand():
    runs = RunsOfAnyWorlds()
    runs.kill((2, False))
    runs.train(1)
    runs.overflow()
    runs.save(wait=True)
    runs.train(2)
    runs.kill((4, True))
    runs.train(2)
    runs.overflow()
    runs.save(wait=False)
    runs.train(2)
    runs.kill((3, True))
    runs.train(1)
    runs.kill_while_it_saves(num_files=7, wait=True, kind=(2, False))  # of 8 files
    runs.train(2)
    runs.kill_while_it_saves(num_files=5, wait=False, kind=(1, False))  # all files but the manifest
    runs.train(3)
    runs.teardown()


@pytest.mark.slow
def test_what_transforms_keep_goes_through_other_worlds_and_wrappers(tmp_path):
    """A schedule, an average, thawing parameters and a window of norms give the result of one
    rank."""
    data = [batch_of(index, is_spoilt=index == 5) for index in range(9)]
    recipe = af.compose(
        af.accumulate(2),
        af.clip(0.5),
        af.schedule(lambda num_updates: 1.0 / (1 + num_updates)),
        af.ema(0.9),
        af.freeze("0", until=4),
        af.skip_nonfinite(),
        af.skip_spikes(),
    )

    def leg(state, folder, wrap, stop):
        goes_on = af.latest(folder) is not None
        model = ours.regression_model(seed=5 if goes_on else 0)  # other values than the saved ones
        plan = af.Plan(ours.mse, model, ours.adamw(model.parameters()))
        state, step = af.build(af.compose(wrap, recipe)(plan), state)
        if goes_on:
            state = af.load(step, state, folder)
        applied = []
        while state.step < stop:
            state, report = step(state, part(data[state.step], state))
            applied.append(bool(report.applied))
        af.save(step, state, folder)
        found = copied(ours.whole(model.state_dict()))
        with af.averaged(step):
            for name, each in ours.whole(model.state_dict()).items():
                found[f"average of {name}"] = each.clone()
        return found, applied, plan.optimizer.param_groups[0]["lr"]

    def run(folder, *legs):
        """Run one world after another; return what every rank of the last one holds, and all
        verdicts."""
        accept = []
        for world_size, *way in legs:
            ends = simulate(lambda state, way=way: leg(state, folder, *way), world_size=world_size)
            accept += ends[0][1]
        return [(found, rate) for found, _, rate in ends], accept

    last = 1, af.wrap_ddp(), len(data)
    stopped = [(2, af.wrap_ddp(), 3), (3, af.wrap_fsdp(), 6), (2, af.wrap_fsdp(), 7)]
    [(expected, last_rate)], accept = run(tmp_path / "whole", last)
    [(found, rate)], found_verdicts = run(tmp_path / "stopped", *stopped, last)
    ours.assert_close(found, expected)
    assert (rate, found_verdicts) == (last_rate, accept)
    assert not all(accept)
