"""Several optimizers in one plan equal the loop by hand that steps one after the other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate, strategies
from tests.laws.law03_worlds import dealt_batches
from tests.support import strategies as ours


def split(model, *, fused=False):
    """Make AdamW for the matrices, and SGD for the rest."""
    parameters = list(model.parameters())
    return {
        "matrices": torch.optim.AdamW([p for p in parameters if p.ndim == 2], lr=0.05, fused=fused),
        "rest": torch.optim.SGD([p for p in parameters if p.ndim < 2], lr=0.05, momentum=0.9),
    }


def by_hand(batches, multiplier=lambda num_updates: 1.0, loss_fn=ours.mse):
    """Return the parameters at the end of the loop by hand, clipped over all; "rest" has a
    schedule."""
    model = ours.regression_model()
    optimizers = split(model)
    for number, batch in enumerate(batches):
        optimizers["rest"].param_groups[0]["lr"] = 0.05 * multiplier(number)
        loss_fn(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for each in optimizers.values():
            each.step()
            each.zero_grad()
    return model.state_dict()


def trained(parts, recipe, **options):
    """Return the parameters of each rank; `parts[rank]` is that rank's batches."""

    def run(state):
        model = ours.regression_model()
        plan = af.Plan(ours.mse, model, split(model, **options))
        state, step = af.build(recipe(plan), state)
        for batch in parts[state.rank]:
            state, _ = step(state, batch)
        return ours.whole(model.state_dict())

    return simulate(run, world_size=len(parts))


def halved(num_updates):
    return 0.5**num_updates


@pytest.mark.parametrize("wrap", [af.wrap_ddp(), af.wrap_fsdp()], ids=["ddp", "fsdp"])
@ours.share(0.3)
@given(dealt=dealt_batches(strategies.batches(), 3), num_microbatches=st.integers(1, 3))
def test_several_optimizers_are_the_loop_by_hand(wrap, dealt, num_microbatches):
    batches, sizes = dealt
    recipe = af.compose(
        wrap, af.accumulate(num_microbatches), af.clip(0.5), af.schedule(halved, optimizer="rest")
    )
    for found in trained(ours.dealt(batches, sizes), recipe):
        ours.assert_close(found, by_hand(batches, halved))
