"""Steps that stay at their batch: what counts, and what does not."""

from dataclasses import replace

import pytest
import torch

import accel_fn as af
from accel_fn.errors import WorldError
from accel_fn.testing import simulate
from tests.support import strategies as ours

BATCH = (torch.arange(12.0).reshape(4, 3).double() / 10, torch.ones(4, 1).double())


def position(state):
    return state.step, state.call


def test_the_position_stays_and_calls_count_until_a_step_advances():
    state, step = ours.built()
    seen = [position(state)]
    for advance in (False, False, True, True, False):
        state, _ = step(state, BATCH, advance=advance)
        seen.append(position(state))
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]


def test_update_stays_as_a_step_does():
    state, step = ours.built()
    state, _ = step(state, BATCH)
    state, grads, report = step.grads(state, BATCH)
    state, _ = step.update(state, grads, report, advance=False)
    assert position(state) == (1, 1)
    state, _ = step.update(*step.grads(state, BATCH))
    assert position(state) == (2, 0)


def test_the_loss_scale_moves_in_a_step_that_stays():
    model = ours.regression_model().float()
    state, step = ours.built(af.with_amp("fp16", init_scale=4.0, growth_interval=1), model=model)
    state, _ = step(state, tuple(each.float() for each in BATCH), advance=False)
    assert (float(state.scaler.scale), *position(state)) == (8.0, 0, 1)


def test_advance_is_a_flag_that_is_refused_before_the_update():
    advance = 0
    state, step = ours.built()
    before = ours.kept_tensors(step)
    with pytest.raises(TypeError, match=f"^step: advance must be True or False, got {advance!r}"):
        step(state, BATCH, advance=advance)
    with pytest.raises(TypeError, match=r"^step\.update: advance must be True or False"):
        step.update(*step.grads(state, BATCH), advance=advance)
    ours.assert_identical(ours.kept_tensors(step), before)


def halving(plan):
    return af.schedule(torch.optim.lr_scheduler.StepLR(plan.optimizer, 2, gamma=0.5))(plan)


TRANSFORMS = {
    "schedule": halving,
    "average": af.ema(0.5),
    "freeze": af.freeze("0", until=3),
    "skip": af.skip_nonfinite(),
    "spikes": af.skip_spikes(window=4),
    "accumulate": af.accumulate(2),
}


@pytest.mark.parametrize("names", [["schedule", "average", "freeze"], [*TRANSFORMS]], ids=str)
def test_transforms_count_updates_and_not_positions(names):
    """A second step on each batch is to them what a batch more is."""
    recipe = af.compose(*[TRANSFORMS[name] for name in names])
    bad = (BATCH[0] * float("nan"), BATCH[1])
    batches = [BATCH, (BATCH[0] * 2, BATCH[1]), bad if "skip" in names else BATCH, BATCH]
    ends = []
    for advances in ([True] * 4, [False, True] * 2, [False] * 4):
        state, step = ours.built(recipe, optimizer=ours.adamw)
        for batch, advance in zip(batches, advances, strict=True):
            state, _ = step(state, batch, advance=advance)
        stateful = [*step.plan.accept, *step.plan.wrap_grad_fn, *step.plan.after_update]
        states = [each.state_dict() for each in stateful if hasattr(each, "state_dict")]
        ends.append((ours.kept_tensors(step), states))
    (expected, states), *others = ends
    for found, its_states in others:
        ours.assert_identical(found, expected)
        torch.testing.assert_close(its_states, states, rtol=0, atol=0)


def test_too_many_skipped_updates_name_the_batch_and_the_call():
    state, step = ours.built(af.skip_nonfinite(2))
    bad = (BATCH[0] * float("nan"), BATCH[1])
    state, _ = step(state, bad, advance=False)
    with pytest.raises(ArithmeticError, match=r"got nan at step 1\.1, and so for 2 in a row"):
        step(state, bad)


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (af.wrap_ddp(), r"same collective, got weights 1(\.1)? on rank . and weights 1(\.1)? on"),
        (af.reproducible(2), r"be in the same step, got step 1 on rank 0 and 1\.1 on rank 1"),
    ],
    ids=["wrap_ddp", "reproducible"],
)
def test_ranks_in_different_steps_on_one_batch_notice_it(recipe, text):
    """As when one of them caught the error of its loss."""

    def run(state):
        state, step = af.build(recipe(ours.plan()), state, check_loss=False)
        with pytest.raises(WorldError, match=text):
            step(replace(state, call=state.rank), af.shard_batch(BATCH, state))

    simulate(run, world_size=2)
