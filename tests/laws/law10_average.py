"""The average of the parameters equals torch's own, ignores skipped updates, and is equal on all
ranks."""

from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.optim import swa_utils

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.laws.law07_scaling import scaled
from tests.support import strategies as ours
from tests.support.averages import (
    BATCH,
    RULES,
    by_hand,
    each_rule,
    growing,
    growing_mean,
    make,
    mean_so_far,
    means,
)
from tests.support.late_reads import read_late


@each_rule
@ours.share(0.34)
@given(
    batches=strategies.batches(num_batches=5),
    skipped=st.sets(st.integers(0, 4), max_size=3),
    world_size=st.integers(1, 3),
    verdict=st.sampled_from([af.skip_nonfinite(), scaled(8.0)]),
)
def test_it_is_torchs_over_the_updates_that_are_made(
    recipe, theirs, batches, skipped, world_size, verdict
):
    made = [batch for index, batch in enumerate(batches) if index not in skipped]
    expected = by_hand(made, theirs)
    parts = ours.dealt_evenly(batches, world_size)

    def run(state):
        state, step = make(af.compose(af.wrap_ddp(), recipe, verdict), state)
        for index, (inputs, targets) in enumerate(parts[state.rank]):
            bad = float("inf") if index in skipped and state.is_main else 1.0
            state, _ = step(state, (inputs * bad, targets))
        return means(step)

    first, *others = simulate(run, world_size=world_size)
    ours.assert_close(first, expected)
    for other in others:
        ours.assert_identical(other, first)


@pytest.mark.parametrize(
    ("make_rule", "theirs"),
    [
        (partial(af.ema, growing), growing_mean),
        (partial(af.ema, 0.9), swa_utils.get_ema_multi_avg_fn(0.9)),
        (af.swa, mean_so_far),
    ],
    ids=RULES,
)
@pytest.mark.parametrize("is_late", [False, True])
@ours.share(0.34)
@given(
    batches=strategies.batches(num_batches=6),
    num_warmup=st.integers(0, 6),
    skipped=st.sets(st.integers(0, 5), max_size=3),
    saved_after=st.integers(0, 6),
    looked_at=st.sets(st.integers(0, 5), max_size=2),
)
@example(batches=[BATCH] * 6, num_warmup=3, skipped={0, 2}, saved_after=3, looked_at=set())
@example(batches=[BATCH] * 5, num_warmup=0, skipped={1, 3}, saved_after=6, looked_at={0, 2})
def test_updates_of_the_warm_up_and_skipped_ones_count_for_nothing(
    tmp_path_factory,
    make_rule,
    theirs,
    batches,
    num_warmup,
    skipped,
    saved_after,
    looked_at,
    is_late,
):
    """So in a run that resumes, and where the host knows late whether an update was made."""
    folder = tmp_path_factory.mktemp("run")
    # The weights of what is known late are in float32.
    tolerance = {"rtol": 1e-6, "atol": 1e-8} if is_late else ours.EXACT

    def built():
        state, step = make(af.compose(make_rule(num_warmup=num_warmup), scaled(8.0)))
        if is_late:
            read_late(*step.plan.after_update)
        return state, step

    state, step = built()
    made = []
    for index, (inputs, targets) in enumerate(batches):
        if index == saved_after:
            af.save(step, state, folder)
            state, step = built()
            state = af.load(step, state, folder)
        bad = float("inf") if index in skipped else 1.0
        state, _ = step(state, (inputs * bad, targets))
        made += [] if index in skipped else [batches[index]]
        if index in looked_at or index + 1 == len(batches):
            ours.assert_close(means(step), by_hand(made, theirs, num_warmup), **tolerance)


@given(batches=strategies.batches(num_batches=3))
def test_training_is_what_it_is_without(batches):
    _, expected = ours.trained(ours.regression_model(), [batches], af.compose())[0]
    _, actual = ours.trained(ours.regression_model(), [batches], af.ema(0.5))[0]
    ours.assert_identical(actual, expected)
