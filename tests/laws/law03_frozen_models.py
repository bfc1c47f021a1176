"""Frozen models of a plan: W ranks and k micro-batches are one process with the models in a closure."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.laws.law03_worlds import dealt_batches
from tests.support import strategies as ours

WRAPPERS = {
    "wrap_ddp": af.wrap_ddp(),
    "wrap_fsdp": af.wrap_fsdp(),
    "in shards": af.wrap_fsdp(frozen=True),
}


def encoder(rank=0):
    """Make a model whose dropout and weights would be others on each rank, if they were not frozen."""
    generator = torch.Generator().manual_seed(rank)
    layers = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.5)) for _ in range(2)]
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def loss_fn(model, batch, frozen):
    """Compare with a frozen model, which is also what the input comes from."""
    inputs, targets = batch
    with torch.no_grad():
        latents = frozen["encoder"](inputs)
    found = frozen["encoder"](model(latents) * inputs)  # the gradient goes through it
    return F.mse_loss(found, targets.expand_as(found))


def by_hand(batches):
    frozen = {"encoder": encoder().eval().requires_grad_(False)}
    with_frozen = lambda *given: loss_fn(*given, frozen)
    model = ours.regression_model()
    return ours.trained_by_hand(model, batches, loss_fn=with_frozen, optimizer=ours.sgd)


def trained(state, parts, recipe):
    model = ours.regression_model()
    frozen = {"encoder": encoder(state.rank)}
    plan = af.Plan(loss_fn, model, ours.sgd(model.parameters()), frozen=frozen)
    state, step = af.build(recipe(plan), state)
    losses = []
    for batch in parts[state.rank]:
        state, report = step(state, batch)
        losses.append(float(report.loss))
    return losses, ours.whole(model.state_dict())


@pytest.mark.parametrize("wrap", WRAPPERS)
@ours.share(0.3)
@given(dealt=dealt_batches(strategies.batches(num_batches=2), 3), k=st.integers(1, 3))
def test_frozen_models_do_not_depend_on_ranks_and_micro_batches(wrap, dealt, k):
    batches, parts = dealt[0], ours.dealt(*dealt)
    recipe = af.compose(af.place(), WRAPPERS[wrap], af.accumulate(k))
    ranks = simulate(lambda state: trained(state, parts, recipe), world_size=len(parts))
    ours.assert_trained(ranks, by_hand(batches))
