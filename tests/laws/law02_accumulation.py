"""Law 2: accumulation does not change a step."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import strategies
from tests.laws.law01_no_transforms import FUSED
from tests.support import strategies as ours


@pytest.mark.parametrize("optimizer", FUSED.values(), ids=FUSED)
@given(batches=strategies.batches(), num_microbatches=st.integers(1, 50))
def test_accumulation_is_the_identity(optimizer, batches, num_microbatches):
    model, options = ours.regression_model(), {"optimizer": optimizer}
    found = ours.trained(model, [batches], af.accumulate(num_microbatches), **options)
    ours.assert_trained(found, ours.trained_by_hand(model, batches, **options))


@given(num_microbatches=st.integers(1, 6))
@example(num_microbatches=3)  # if the backwards start from one tensor, the second one changes it
def test_a_loss_that_is_a_view_of_a_parameter_has_a_gradient_of_one(num_microbatches):
    model = torch.nn.Linear(1, 1).double()
    plan = af.Plan(lambda model, batch: model.bias.view(()), model, ours.sgd(model.parameters()))
    state, step = af.build(af.accumulate(num_microbatches)(plan), af.DistState())
    _, grads, _ = step.grads(state, torch.ones(12, 1).double())
    [gradient] = [each for each in grads.values() if each is not None]
    torch.testing.assert_close(gradient, torch.ones(1).double(), rtol=1e-12, atol=0.0)


@given(batches=strategies.labelled_batches(), num_microbatches=st.integers(1, 50))
@example(
    batches=[
        {"inputs": torch.ones(2, 3, 3).double(), "labels": torch.tensor([[-100] * 3, [1] * 3])}
    ],
    num_microbatches=2,
)
def test_accumulation_is_the_identity_for_masked_tokens(batches, num_microbatches):
    model, options = ours.token_model(), {"loss_fn": ours.token_loss}
    recipe, weight_fn = af.accumulate(num_microbatches), af.count_labels("labels")
    found = ours.trained(model, [batches], recipe, weight_fn=weight_fn, **options)
    ours.assert_trained(found, ours.trained_by_hand(model, batches, **options))


@given(batches=strategies.batches(), pieces=st.integers(1, 5))
def test_a_split_of_the_users_counts_its_parts_by_weight(batches, pieces):
    def split(batch):
        return list(zip(*[value.split(pieces) for value in batch], strict=True))

    found = ours.trained(ours.regression_model(), [batches], af.accumulate(2, split=split))
    ours.assert_trained(found, ours.trained_by_hand(ours.regression_model(), batches))
