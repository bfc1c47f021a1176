"""Law 9: stop anywhere, go on at any world size; nothing shows."""

from __future__ import annotations

import itertools
import tempfile
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.checkpoint import _publishing, _writing
from accel_fn.checkpoint._publishing import Draft
from accel_fn.testing import simulate
from tests import strategies as ours

NUM_BATCHES = 9


@dataclass(frozen=True)
class Life:
    """A process's: ranks, updates before each of its saves, and those that are lost when it is killed."""

    world_size: int
    kept: tuple[int, ...]
    lost: int = 0
    waits: bool = True
    """For its saves; else those end while further updates are made."""
    sharded: bool = False
    """Parameters and optimizer state, over the ranks; else each holds all of them."""
    num_files: int | None = None
    """That its saves write until it is killed in one; None: it is killed later."""


lives = st.lists(
    st.builds(
        Life,
        st.integers(1, 4),
        st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
        st.integers(0, 3),
        st.booleans(),
        st.booleans(),
        st.none() | st.integers(0, 20),
    ),
    max_size=4,
)


def batches(spoilt: frozenset[int]):
    """Global batches of odd sizes; those that are spoilt overflow."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(NUM_BATCHES):
        inputs = torch.randn(3 + index % 4, 3, generator=generator).double()
        targets = torch.randn(len(inputs), 1, generator=generator).double()
        if index in spoilt:
            inputs[-1] = float("nan")  # on the last rank alone
        found.append((inputs, targets))
    return found


def scaled(plan):
    return replace(plan, starts=(lambda state: replace(state, scaler=af.LossScale.start(2.0**8)),))


@contextmanager
def killed_after(num_files):
    """After so many files no more is written but a half of the next, and nobody clears up."""
    write, left = _writing.write_file, itertools.count(num_files, -1)

    def writing(path, data):
        if next(left) <= 0:
            path.write_bytes(b"half")
            raise OSError("killed")
        return write(path, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_writing, "write_file", writing)
        patch.setattr(_publishing, "write_file", writing)
        patch.setattr(Draft, "discard", lambda draft: None)
        yield


def live(folder, life, data):
    """Start anew, go on from the newest checkpoint, save, and do what is lost.

    Of each rank: parameters and state at the last save, and the losses, to the bit, by step.
    """

    def run(state):
        model = ours.regression_model(seed=5)  # other values than those saved
        plan = af.Plan(ours.mse, model, ours.adamw(model.parameters()))
        wrap = af.wrap_fsdp() if life.sharded else af.wrap_ddp()
        recipe = af.compose(wrap, scaled, af.accumulate(2), af.clip(0.5))
        state, step = af.build(state, recipe(plan))
        state, losses = af.load(folder, state, step), {}

        def train(state, num_updates):
            for number in range(state.step, min(state.step + num_updates, len(data))):
                state, report = step(state, part(data, state))
                losses[number] = float(report.loss).hex()
            return state

        try:
            for num_updates in life.kept:
                state = train(state, num_updates)
                af.save(folder, state, step, keep=2, wait=life.waits)
            tensors = ours.whole(model.state_dict())
            result = {name: value.clone() for name, value in tensors.items()}, state, losses
            train(state, life.lost)
            if not life.waits:  # the process lives on in this one: what it writes must be there
                af.load(folder, state, step)
        except RuntimeError as error:
            if "killed" not in str(error):
                raise
            return None, state, losses
        return result

    with nullcontext() if life.num_files is None else killed_after(life.num_files):
        return simulate(run, world_size=life.world_size)


def part(data, state):
    batch = data[state.step]
    cuts = [len(batch[0]) * rank // state.world_size for rank in range(state.world_size + 1)]
    return ours.rows(batch, cuts[state.rank], cuts[state.rank + 1])


def begin(folder):
    """The checkpoint before the first step."""

    def run(state):
        model = ours.regression_model()
        plan = scaled(af.wrap_ddp()(af.Plan(ours.mse, model, ours.adamw(model.parameters()))))
        state, step = af.build(state, af.clip(0.5)(plan))
        af.save(folder, state, step)

    simulate(run, world_size=1)


@ours.share(0.2)
@given(lives=lives, spoilt=st.frozensets(st.integers(0, NUM_BATCHES - 1), max_size=3))
@example(
    lives=[Life(2, (3,), 2), Life(4, (2, 1), 1, waits=False), Life(1, (1,), 3)],
    spoilt=frozenset({1, 4}),
)
@example(
    lives=[
        Life(2, (1,), 2),
        Life(4, (2,), 1, waits=False, sharded=True),
        Life(3, (1, 2), sharded=True, num_files=10),  # of its first save, 8
        Life(2, (2, 1), waits=False, num_files=5),  # all but the manifest
    ],
    spoilt=frozenset({1, 4}),
)
def test_any_stops_at_any_worlds_are_the_run_by_hand(lives, spoilt):
    data = batches(spoilt)
    clean = [batch for index, batch in enumerate(data) if index not in spoilt]
    _, expected = ours.trained_by_hand(ours.regression_model(), clean, max_norm=0.5)
    with tempfile.TemporaryDirectory() as folder:
        begin(folder)
        for life in lives:
            live(folder, life, data)
        for parameters, state, _ in live(folder, Life(3, (NUM_BATCHES,)), data):
            ours.assert_close(parameters, expected)
            assert state.step == NUM_BATCHES
            assert float(state.scaler.scale) == 2.0 ** (8 - len(spoilt))
            assert int(state.scaler.skipped) == len(spoilt)


@ours.share(0.16)
@given(world_size=st.integers(1, 4), sharded=st.booleans(), lives=lives)
@example(world_size=2, sharded=True, lives=[Life(2, (3,), 2, waits=False)])
def test_stops_at_one_world_size_change_no_bit(world_size, sharded, lives):
    """Of the losses neither, also of steps that are made again."""
    data = batches(frozenset({2}))
    ends, losses = [], []
    alike = [replace(life, world_size=world_size, sharded=sharded) for life in lives]
    last = Life(world_size, (NUM_BATCHES,), sharded=sharded)
    for each in ([last], [*alike, last]):
        with tempfile.TemporaryDirectory() as folder:
            begin(folder)
            *stopped, end = [live(folder, life, data) for life in each]
        ends.append(end)
        losses.append([said for ranks in [*stopped, end] for _, _, said in ranks])
    for (whole, *_), (found, *_) in zip(*ends, strict=True):
        ours.assert_identical(found, whole)
    whole, *_ = losses[0]
    assert whole.keys() == set(range(NUM_BATCHES))
    for said in losses[0] + losses[1]:
        assert said.items() <= whole.items()


def test_what_transforms_keep_goes_through_other_worlds_and_wrappers(tmp_path):
    """A rate that moves, an average, parameters that thaw, norms that are looked back on: as on one rank."""
    data = batches(frozenset({5}))
    recipe = af.compose(
        af.accumulate(2),
        af.clip(0.5),
        af.schedule(lambda num_updates: 1.0 / (1 + num_updates)),
        af.average(0.9),
        af.freeze("0", until=4),
        af.skip_nonfinite(),
        af.skip_spikes(),
    )

    def leg(state, folder, wrap, stop):
        goes_on = af.latest(folder) is not None
        model = ours.regression_model(seed=5 if goes_on else 0)  # other values than those saved
        plan = af.Plan(ours.mse, model, ours.adamw(model.parameters()))
        state, step = af.build(state, af.compose(wrap, recipe)(plan))
        if goes_on:
            state = af.load(folder, state, step)
        applied = []
        while state.step < stop:
            state, report = step(state, part(data, state))
            applied.append(bool(report.applied))
        af.save(folder, state, step)
        found = {name: each.clone() for name, each in ours.whole(model.state_dict()).items()}
        with af.averaged(step):
            for name, each in ours.whole(model.state_dict()).items():
                found[f"average of {name}"] = each.clone()
        return found, applied, plan.optimizer.param_groups[0]["lr"]

    def run(folder, *legs):
        """What every rank of the last one ends with, and the verdicts of all steps."""
        verdicts = []
        for world_size, *way in legs:
            ends = simulate(lambda state, way=way: leg(state, folder, *way), world_size=world_size)
            verdicts += ends[0][1]
        return [(found, rate) for found, _, rate in ends], verdicts

    last = 1, af.wrap_ddp(), NUM_BATCHES
    stopped = [(2, af.wrap_ddp(), 3), (3, af.wrap_fsdp(), 6), (2, af.wrap_fsdp(), 7)]
    [(expected, last_rate)], verdicts = run(tmp_path / "whole", last)
    [(found, rate)], found_verdicts = run(tmp_path / "stopped", *stopped, last)
    ours.assert_close(found, expected)
    assert (rate, found_verdicts) == (last_rate, verdicts)
    assert not all(verdicts)
