"""Law 7: a loss scale changes nothing, and an overflow anywhere skips the update everywhere."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.support import strategies as ours

OPTIMIZERS = {
    "adamw": ours.adamw,
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "sgd": ours.sgd,
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
}


def scaled(init_scale, growth_interval=2000):
    """Return a transform that scales the loss without autocast, so that float64 shows the effect of
    scaling alone."""

    def start(state):
        if state.scaler is not None:
            return state
        scaler = af.extend.LossScale.start(init_scale, growth_interval=growth_interval)
        return replace(state, scaler=scaler)

    return lambda plan: replace(plan, init_state=(*plan.init_state, start))


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@given(batches=strategies.batches(), exponent=st.integers(-30, 30), interval=st.integers(1, 4))
def test_scaling_by_a_power_of_two_changes_no_bit(optimizer, batches, exponent, interval):
    train = partial(ours.trained, ours.regression_model(), [batches], optimizer=optimizer)
    losses, expected = train(af.compose())[0]
    found, actual = train(scaled(2.0**exponent, interval))[0]
    ours.assert_identical(actual, expected)
    assert found == losses


WRAPPED = [(name, af.wrap_ddp()) for name in OPTIMIZERS]
WRAPPED += [("adamw", af.wrap_fsdp())]
WRAPPED += [
    pytest.param(name, af.wrap_fsdp(), marks=pytest.mark.slow) for name in ("fused adamw", "sgd")
]  # torch has no fused SGD for shards


@pytest.mark.parametrize(("optimizer", "wrap"), WRAPPED)
@ours.share(0.34)
@given(
    batches=strategies.batches(num_batches=5),
    poisoned=st.lists(st.booleans(), min_size=5, max_size=5),
    world_size=st.integers(1, 3),
    culprit=st.integers(0, 2),
    bad=st.sampled_from([float("inf"), float("nan")]),
)
def test_an_overflow_on_one_rank_skips_the_update_on_all(
    optimizer, wrap, batches, poisoned, world_size, culprit, bad
):
    """The result equals the reference loop over the other batches, also if the first batch is
    skipped."""
    optimizer = OPTIMIZERS[optimizer]
    clean = [batch for batch, is_bad in zip(batches, poisoned, strict=False) if not is_bad]
    _, expected = ours.trained_by_hand(
        ours.regression_model(), clean, optimizer=optimizer, max_norm=0.5
    )
    parts = []
    for rank in range(world_size):
        mine = []
        for (inputs, targets), is_bad in zip(batches, poisoned, strict=False):
            part = inputs.tensor_split(world_size)[rank], targets.tensor_split(world_size)[rank]
            size = max(1, len(part[0]))
            sure = torch.zeros(size, 3).double(), torch.zeros(size, 1).double()
            if is_bad:
                part = (sure[0] + (bad if rank == culprit % world_size else 0.0), sure[1])
            mine.append(part)
        parts.append(mine)

    def run(state):
        recipe = af.compose(wrap, af.clip(0.5), scaled(1024.0))
        state, step = ours.built(recipe, state, optimizer=optimizer)
        applied = []
        for part in parts[state.rank]:
            state, report = step(state, part)
            applied.append(bool(report.applied))
        parameters = ours.whole(step.plan.model.state_dict())
        return parameters, applied, float(state.scaler.scale), int(state.scaler.skipped)

    skipped = sum(poisoned[: len(batches)])
    for parameters, applied, scale, counted in simulate(run, world_size=world_size):
        ours.assert_close(parameters, expected)
        assert applied == [not is_bad for is_bad in poisoned[: len(batches)]]
        assert (scale, counted) == (1024.0 * 0.5**skipped, skipped)


@given(outcomes=st.lists(st.booleans(), max_size=12), interval=st.integers(1, 4))
def test_the_scale_moves_by_its_rule(outcomes, interval):
    scaler = af.extend.LossScale.start(2.0**10, growth_interval=interval)
    scale, good = 2.0**10, 0
    for ok in outcomes:
        scaler = scaler.adjust(torch.tensor(ok))
        good = good + 1 if ok else 0
        if not ok:
            scale /= 2
        elif good == interval:
            scale, good = scale * 2, 0
        assert (float(scaler.scale), int(scaler.good_steps)) == (scale, good)
    assert int(scaler.skipped) == outcomes.count(False)


def test_the_scale_stays_finite_and_above_zero():
    grown = shrunk = af.extend.LossScale.start(1.0, growth_interval=1)
    for _ in range(400):
        grown, shrunk = grown.adjust(torch.tensor(True)), shrunk.adjust(torch.tensor(False))
    assert torch.isfinite(grown.scale)
    assert torch.isfinite(shrunk.scale.reciprocal())


@pytest.mark.parametrize(("fused", "world_size"), [(False, 2), (True, 1)])
def test_float16_autocast_skips_halves_and_continues(fused, world_size):
    def run(state):
        model = ours.regression_model().float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
        recipe = af.compose(af.place(), af.wrap_ddp(), af.with_amp("fp16", init_scale=2.0**14))
        state, step = af.build(recipe(af.Plan(ours.mse, model, optimizer)), state)
        before = [p.detach().clone() for p in model.parameters()]
        batch = (torch.ones(2, 3), torch.ones(2, 1))
        state, report = step(state, (batch[0] * 1e6 if state.is_main else batch[0], batch[1]))
        unmoved = all(
            torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)
        )
        first = bool(report.applied), unmoved, float(state.scaler.scale)
        losses = []
        for _ in range(20):
            state, report = step(state, batch)
            losses.append(float(report.loss))
        return first, losses[-1] < losses[0], bool(report.applied), report.grad_norm.dtype

    for result in simulate(run, world_size=world_size):
        assert result == ((False, True, 2.0**13), True, True, torch.float32)


def test_two_float16_steps_share_one_scale():
    """The second step's overflow does not change the first one's update: each unscales by its own
    seed."""
    amp = af.with_amp("fp16", init_scale=256.0)

    def built(state):
        model = ours.regression_model().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return *af.build(amp(af.Plan(ours.mse, model, optimizer)), state), model

    state, first, _ = built(af.DistState())
    state, second, model = built(state)
    batch = (torch.ones(2, 3), torch.ones(2, 1))
    state, _ = first(state, (batch[0] * 1e6, batch[1]))
    before = float(state.scaler.scale)
    _, report = second(state, batch)
    state, lone, expected = built(af.DistState())
    lone(state, batch)
    assert (before, bool(report.applied)) == (128.0, True)
    # without subnormals, the float16 backward rounds alike under scales of 128 and 256
    ours.assert_identical(model.state_dict(), expected.state_dict())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("recipe", [af.clip_value(0.1), af.clip(0.1)], ids=["clip_value", "clip"])
def test_what_transforms_make_of_an_overflow_does_not_hide_it(recipe, bad):
    """clip_value would turn an infinity into its bound, so the check comes first."""
    state, step = ours.built(af.compose(scaled(8.0), recipe))
    state, report = step(state, (torch.full((2, 3), bad).double(), torch.ones(2, 1).double()))
    assert not report.applied
    ours.assert_identical(step.plan.model.state_dict(), ours.regression_model().state_dict())
