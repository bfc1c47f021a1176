"""What a step offers beside training gives on the device what it gives on the CPU."""

import pytest
import torch
from torch import nn

import accel_fn as af
from tests.sim.programs import OPTIMIZERS, loss_fn, make_batches, make_model, whole


def make(device):
    model = make_model()
    model.norm = nn.BatchNorm1d(1).double()  # trained by nobody; its buffers are moved and kept
    plan = af.Plan(loss_fn, model, OPTIMIZERS["fused"](model.parameters()))
    recipe = af.compose(af.place(), af.accumulate(2), af.clip(0.1), af.ema(0.9))
    state, step = af.build(recipe(plan), af.init(device=device))
    for batch in make_batches(3):
        state, _ = step(state, batch)
    return state, step


def evaluated(state, step):
    return af.evaluate(step, state, make_batches(2))


def evaluated_average(state, step):
    with af.averaged(step):
        return af.evaluate(step, state, make_batches(2))


def predicted(state, step):
    """Rows of tensors and of lists are on the host, whatever the device."""
    rows = lambda model, batch: {"out": model(batch[0]), "items": [*model(batch[0])]}
    found = af.predict(step, state, make_batches(2), rows)
    assert {each.device.type for each in [found["out"], *found["items"]]} == {"cpu"}
    return found


def forward(state, step):
    return step.forward(state, make_batches(1)[0])


def by_hand(state, step):
    state, grads, report = step.grads(state, make_batches(1)[0])
    state, report = step.update(state, grads, report)
    return {name: whole(each) for name, each in step.plan.model.named_parameters()}


def weights(state, step):
    return {name: whole(each) for name, each in step.plan.model.state_dict().items()}


@pytest.mark.parametrize(
    "function", [evaluated, evaluated_average, predicted, forward, by_hand, weights]
)
def test_it_is_that_of_the_cpu(function):
    found, expected = (function(*make(device)) for device in ("sim", "cpu"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, check_device=False)


def test_evaluation_leaves_the_generator_of_the_device_where_it_stood():
    state, step = make("sim")
    before = torch.sim.get_rng_state()
    af.evaluate(
        step, state, make_batches(1), lambda model, batch: {"drawn": torch.rand_like(batch[0])}
    )
    assert torch.equal(torch.sim.get_rng_state(), before)
