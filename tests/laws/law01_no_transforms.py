"""Law 1: a step without transforms is the loop by hand, to the bit."""

import pytest
import torch
from hypothesis import given

import accel_fn as af
from accel_fn.testing import strategies
from tests.support import strategies as ours

FUSED = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "default": ours.adamw,
    "sgd": ours.sgd,
}


@pytest.mark.parametrize("optimizer", FUSED.values(), ids=FUSED)
@given(batches=strategies.batches())
def test_a_plan_without_transforms_is_the_hand_written_loop_to_the_bit(optimizer, batches):
    losses, expected = ours.trained_by_hand(ours.regression_model(), batches, optimizer=optimizer)
    found, actual = ours.trained(
        ours.regression_model(), [batches], af.compose(), optimizer=optimizer
    )[0]
    ours.assert_identical(actual, expected)
    assert found == losses
