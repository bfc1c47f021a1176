"""Law 9: stop anywhere, go on at any world size; nothing shows."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace

import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate
from tests import strategies as ours

NUM_BATCHES = 9


@dataclass(frozen=True)
class Life:
    """A process's: ranks, updates up to its last save, and those that are lost when it is killed."""

    world_size: int
    kept: int
    lost: int
    waits: bool = True
    """For its save; else that ends while the lost updates are made."""
    sharded: bool = False
    """Parameters and optimizer state, over the ranks; else each holds all of them."""


lives = st.lists(
    st.builds(
        Life, st.integers(1, 4), st.integers(0, 4), st.integers(0, 3), st.booleans(), st.booleans()
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


def live(folder, life, data, *, last=False):
    """Start anew, go on from the newest checkpoint, save, and do what is lost; parameters, and the state."""

    def run(state):
        model = ours.regression_model(seed=5 + life.kept)  # other values than those saved
        plan = af.Plan(ours.mse, model, ours.adamw(model.parameters()))
        wrap = af.wrap_fsdp() if life.sharded else af.wrap_ddp()
        recipe = af.compose(wrap, scaled, af.accumulate(2), af.clip(0.5))
        state, step = af.build(state, recipe(plan))
        state = af.load(folder, state, step)
        stop = len(data) if last else min(state.step + life.kept, len(data))
        while state.step < stop:
            state, _ = step(state, part(data, state))
        before = number_of(af.latest(folder))
        path = af.save(folder, state, step, keep=2, wait=life.waits)
        tensors = ours.whole(model.state_dict())
        result = {name: value.clone() for name, value in tensors.items()}, state
        for _ in range(min(life.lost, len(data) - state.step)):
            state, _ = step(state, part(data, state))
        # The process lives on in this one: what it writes in the background must be there, also
        # where it writes a checkpoint of the same step anew.
        while af.latest(folder) != path or number_of(path) == before:
            time.sleep(0.002)
        return result

    return simulate(run, world_size=life.world_size)


def number_of(path):
    """Of the folder itself: one that takes its place has another."""
    return path.stat().st_ino


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
@example(lives=[Life(2, 3, 2), Life(4, 2, 1, False), Life(1, 1, 3)], spoilt=frozenset({1, 4}))
@example(
    lives=[Life(2, 1, 2), Life(4, 2, 1, False, True), Life(3, 1, 0, True, True), Life(2, 2, 0)],
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
        for parameters, state in live(folder, Life(3, 0, 0), data, last=True):
            ours.assert_close(parameters, expected)
            assert state.step == NUM_BATCHES
            assert float(state.scaler.scale) == 2.0 ** (8 - len(spoilt))
            assert int(state.scaler.skipped) == len(spoilt)


@ours.share(0.16)
@given(
    world_size=st.integers(1, 4),
    sharded=st.booleans(),
    stops=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=4),
)
def test_stops_at_one_world_size_change_no_bit(world_size, sharded, stops):
    data = batches(frozenset({2}))
    ends = []
    stopped = [Life(world_size, kept, 2, waits, sharded) for kept, waits in stops]
    for lives in ([], stopped):
        with tempfile.TemporaryDirectory() as folder:
            begin(folder)
            for life in lives:
                live(folder, life, data)
            ends.append(live(folder, Life(world_size, 0, 0, True, sharded), data, last=True))
    for (whole, _), (found, _) in zip(*ends, strict=True):
        ours.assert_identical(found, whole)


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
