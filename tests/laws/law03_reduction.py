"""A loss that is a sum over its items is that of one process, for any ranks and micro-batches."""

import pytest
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import strategies
from tests.laws.law03_worlds import dealt_batches
from tests.support import strategies as ours


def summed(model, batch):
    """Return the sum over samples."""
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum")


def trained(parts, recipe, loss_fn=summed, check_loss=True, **options):
    """Return the losses of each step and the parameters at the end, of each rank."""
    return ours.trained(
        ours.regression_model(),
        parts,
        recipe,
        loss_fn=loss_fn,
        optimizer=ours.sgd,
        check_loss=check_loss,
        **options,
    )


@pytest.mark.parametrize("wrap", [af.wrap_ddp(), af.wrap_fsdp()], ids=["ddp", "fsdp"])
@ours.share(0.3)
@given(dealt=dealt_batches(strategies.batches(), 4), num_microbatches=st.integers(1, 3))
def test_a_sum_is_that_of_one_process(wrap, dealt, num_microbatches):
    batches, sizes = dealt
    expected = ours.trained_by_hand(
        ours.regression_model(), batches, loss_fn=summed, optimizer=ours.sgd
    )
    recipe = af.compose(wrap, af.accumulate(num_microbatches))
    ours.assert_trained(trained(ours.dealt(batches, sizes), recipe, reduction="sum"), expected)
