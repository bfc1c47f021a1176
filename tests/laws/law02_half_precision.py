"""Law 2 with parameters in half precision: the error of a gradient does not grow with micro-batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn.testing import simulate
from tests.support import strategies as ours

RECIPES = {
    "alone": (af.compose(), 1),
    "wrap_ddp": (af.wrap_ddp(), 2),
    "wrap_fsdp": (af.wrap_fsdp(), 2),
    "reduce_dtype=None": (af.wrap_fsdp(reduce_dtype=None), 2),
    "reproducible": (af.reproducible(2), 2),
}
MOST = 7
"""The binary logarithm of the largest number of micro-batches."""


def rows(seed, dtype):
    """Draw rows whose gradients point in one direction, as in the first steps of a training."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(2 * 2**MOST, 3, generator=generator).add(0.5)
    return inputs.to(dtype), torch.rand(len(inputs), 1, generator=generator).add(5).to(dtype)


def gradients(recipe, world_size, batch, dtype):
    def run(state):
        model = ours.regression_model().to(dtype)
        plan = recipe(af.Plan(ours.mse, model, ours.sgd(model.parameters())))
        state, step = af.build(plan, state, check_loss=False)
        _, grads, _ = step.grads(state, af.shard_batch(batch, state))
        assert {each.dtype for each in grads.values()} == {dtype}
        found = {str(index): each for index, each in enumerate(grads.values())}
        return torch.cat([each.double().flatten() for each in ours.whole(found).values()])

    return simulate(run, world_size=world_size)


def check(name, dtype, seed, log_k):
    recipe, world_size = RECIPES[name]
    batch = rows(seed, dtype)
    model = ours.regression_model().to(dtype).double()
    ours.mse(model, tuple(each.double() for each in batch)).backward()
    expected = torch.cat([each.grad.flatten() for each in model.parameters()])
    # A gradient is rounded a few times: in the backward, over ranks, and as the sum. Added up in half
    # precision, 128 parts would be off by 10 units in bfloat16.
    bound = 4 * torch.finfo(dtype).eps
    recipe = af.compose(recipe, af.accumulate(2**log_k))
    for found in gradients(recipe, world_size, batch, dtype):
        assert float((found - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("alone", torch.bfloat16),
        ("wrap_ddp", torch.bfloat16),
        pytest.param("wrap_fsdp", torch.bfloat16, marks=pytest.mark.slow),
        ("reduce_dtype=None", torch.float16),
        ("reproducible", torch.bfloat16),
    ],
    ids=str,
)
def test_the_error_of_a_gradient_over_many_micro_batches_is_that_of_its_dtype(name, dtype):
    check(name, dtype, seed=0, log_k=MOST)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@ours.share(1.5)
@given(name=st.sampled_from([*RECIPES]), seed=st.integers(0, 99), log_k=st.integers(0, MOST))
def test_the_error_of_a_gradient_does_not_grow_with_micro_batches(dtype, name, seed, log_k):
    check(name, dtype, seed, log_k)
