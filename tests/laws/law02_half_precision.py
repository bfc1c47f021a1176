"""Law 2 with parameters in half precision: the error of a gradient does not grow with micro-batches."""

import copy

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

RECIPES = {
    "alone": (af.accumulate, 1),
    "wrap_ddp": (lambda k: af.compose(af.wrap_ddp(), af.accumulate(k)), 2),
    "wrap_fsdp": (lambda k: af.compose(af.wrap_fsdp(), af.accumulate(k)), 2),
    "reduce_dtype=None": (
        lambda k: af.compose(af.wrap_fsdp(reduce_dtype=None), af.accumulate(k)),
        2,
    ),
    "reproducible": (lambda k: af.compose(af.reproducible(2), af.accumulate(k)), 2),
}
NUM_ROWS = 512


def rows(seed, dtype):
    """Draw rows whose gradients point in one direction, as in the first steps of a training."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(NUM_ROWS, 3, generator=generator).add(0.5)
    return inputs.to(dtype), torch.rand(NUM_ROWS, 1, generator=generator).add(5).to(dtype)


def model_of(dtype):
    return ours.regression_model().to(dtype)


def exact(batch, dtype):
    model = copy.deepcopy(model_of(dtype)).double()
    ours.mse(model, tuple(each.double() for each in batch)).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()])


def gradient(state, recipe, batch, dtype):
    model = model_of(dtype)
    plan = recipe(af.Plan(ours.mse, model, ours.sgd(model.parameters())))
    state, step = af.build(state, plan, check_loss=False)
    _, grads, _ = step.grads(state, af.part(batch, state))
    found = {str(index): each for index, each in enumerate(grads.values())}
    assert {each.dtype for each in found.values()} == {dtype}
    return torch.cat([each.double().flatten() for each in ours.whole(found).values()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
@ours.share(0.2)
@given(seed=st.integers(0, 99), log_k=st.integers(0, 8))
@example(seed=0, log_k=8)
def test_the_error_of_a_gradient_does_not_grow_with_micro_batches(name, dtype, seed, log_k):
    recipe, world_size = RECIPES[name]
    batch = rows(seed, dtype)
    expected = exact(batch, dtype)
    runs = simulate(
        lambda state: gradient(state, recipe(2**log_k), batch, dtype), world_size=world_size
    )
    # A gradient is rounded a few times: in the backward, over ranks, and as the sum. Added up in half
    # precision, 256 parts would be off by 20 to 30 units in bfloat16.
    bound = 4 * torch.finfo(dtype).eps
    for found in runs:
        assert float((found - expected).norm() / expected.norm()) < bound
