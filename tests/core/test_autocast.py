"""autocast and compute_dtype: the precision of a step, outside of it."""

import pytest
import torch

import accel_fn as af
from tests.support import strategies as ours

INPUTS = torch.ones(2, 3)


def made(recipe, state=None):
    model = ours.regression_model().float()
    plan = recipe(ours.plan(model=model))
    return plan, *af.build(plan, state or af.DistState())


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        (af.compose(), torch.float32),
        (af.with_amp("no"), torch.float32),
        (af.with_amp("bf16"), torch.bfloat16),
        (af.compose(af.accumulate(2), af.with_amp("fp16"), af.clip(1.0)), torch.float16),
    ],
    ids=["none", "no", "bf16", "fp16"],
)
def test_forwards_outside_compute_as_those_of_the_step(recipe, dtype):
    plan, state, step = made(recipe)
    with torch.no_grad(), af.autocast(step, state):
        found = plan.model(INPUTS)
    assert found.dtype == af.extend.compute_dtype(plan) == af.extend.compute_dtype(step) == dtype
    assert plan.model(INPUTS).dtype == torch.float32  # the precision ends with the context


def test_products_in_float8_are_those_of_the_step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    plan = af.Plan(
        lambda model, batch: model(batch).float().mean(), model, ours.sgd(model.parameters())
    )
    state, step = af.build(af.with_amp("fp8")(plan), af.DistState(), check_loss=False)
    inputs = torch.randn(8, 16)
    with torch.no_grad(), af.autocast(step, state):
        found = model(inputs)
    assert float(found.float().mean()) == float(step.forward(state, inputs))
    assert af.extend.compute_dtype(step) == torch.bfloat16


def test_shards_compute_in_their_own_dtype_unless_autocast_has_another():
    wrap = af.wrap_fsdp(param_dtype=torch.bfloat16)
    plan = ours.plan(model=ours.regression_model().float())
    assert af.extend.compute_dtype(wrap(plan)) == torch.bfloat16
    assert af.extend.compute_dtype(af.compose(wrap, af.with_amp("fp16"))(plan)) == torch.float16
    assert af.extend.compute_dtype(af.wrap_fsdp()(plan)) == torch.float32


def test_a_model_in_double_precision_computes_in_it():
    assert af.extend.compute_dtype(ours.plan()) == torch.float64


def test_autocast_takes_a_step():
    with (
        pytest.raises(
            TypeError, match="autocast: step must be a Step, as build returns it, got 'P"
        ),
        af.autocast(ours.plan(), af.DistState()),
    ):
        pass


def test_compute_dtype_takes_a_plan_or_a_step():
    with pytest.raises(TypeError, match="compute_dtype: plan must be a Plan or a Step, got 'str'"):
        af.extend.compute_dtype("bf16")
