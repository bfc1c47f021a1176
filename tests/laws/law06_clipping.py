"""Law 6, through a whole step: the update is that of a gradient within the bound."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import strategies
from tests.support import strategies as ours

OPTIMIZERS = {
    "foreach": lambda p: torch.optim.SGD(p, lr=1.0),
    "fused": lambda p: torch.optim.SGD(p, lr=1.0, fused=True),
}
bounds = st.floats(1e-3, 1e3)


def update_of(batch, recipe, optimizer):
    """Return the gradient that plain SGD with a learning rate of one applied, and the report."""
    model = ours.regression_model()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    state, step = ours.built(recipe, model=model, optimizer=optimizer)
    _, report = step(state, batch)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return before - after, report


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@given(batch=strategies.batches(num_batches=1), max_norm=bounds)
def test_the_norm_is_at_most_the_bound_and_the_direction_kept(optimizer, batch, max_norm):
    plain, _ = update_of(batch[0], af.compose(), optimizer)
    clipped, report = update_of(batch[0], af.clip(max_norm), optimizer)
    # each element was subtracted from a parameter near 1, which rounds once
    slack = 1e-15 * len(plain) ** 0.5
    assert float(clipped.norm()) <= max_norm * (1 + 1e-12) + slack
    assert float(report.grad_norm) == pytest.approx(float(plain.norm()), rel=1e-6)
    direction = clipped * float(plain.norm()) - plain * float(clipped.norm())
    assert float(direction.abs().max()) <= 4 * slack * (1 + float(plain.norm()))
    twice, _ = update_of(batch[0], af.compose(af.clip(max_norm), af.clip(max_norm)), optimizer)
    # the 1e-6 in the denominator, as in torch, shrinks a clipped gradient by 1e-6 / norm again
    torch.testing.assert_close(twice, clipped, rtol=2e-6 / max_norm, atol=1e-15)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@given(batch=strategies.batches(num_batches=1))
def test_an_inactive_clip_changes_no_bit(optimizer, batch):
    plain, _ = update_of(batch[0], af.compose(), optimizer)
    clipped, _ = update_of(batch[0], af.compose(af.clip(1e6), af.clip_value(1e6)), optimizer)
    torch.testing.assert_close(clipped, plain, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@given(batch=strategies.batches(num_batches=1), max_value=bounds)
def test_no_element_is_beyond_the_bound_of_clip_value(optimizer, batch, max_value):
    plain, _ = update_of(batch[0], af.compose(), optimizer)
    clamped, report = update_of(batch[0], af.clip_value(max_value), optimizer)
    torch.testing.assert_close(clamped, plain.clamp(-max_value, max_value), rtol=1e-12, atol=1e-14)
    assert report.grad_norm is None
