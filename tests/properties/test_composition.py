"""Laws 4 and 5: the order of transforms does not matter, and composing them is associative."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from accel_fn._plan import slot_names
from accel_fn.testing import strategies
from tests import strategies as ours

TRANSFORMS = {
    "place": af.place(),
    "wrap_ddp": af.wrap_ddp(),
    "accumulate": af.accumulate(2),
    "clip": af.clip(0.3),
    "with_amp": af.with_amp("bf16"),
    "skip_nonfinite": af.skip_nonfinite(),
    "skip_spikes": af.skip_spikes(),
    "freeze": af.freeze("0.weight", until=2),
    "check_replicas": af.check_replicas(2),
    "average": af.average(0.9),
    "schedule": af.schedule(lambda num_updates: 1 / (num_updates + 1)),
}


@given(
    order=st.permutations(list(TRANSFORMS)),
    wrap=st.sampled_from([af.wrap_ddp(), af.wrap_fsdp()]),
    batches=strategies.batches(num_batches=2),
    world_size=st.integers(1, 3),
)
def test_any_order_of_transforms_is_the_same_step_to_the_bit(order, wrap, batches, world_size):
    transforms = {**TRANSFORMS, "wrap_ddp": wrap}
    parts = ours.dealt_evenly(batches, world_size)
    listed = ours.trained(ours.regression_model(), parts, af.compose(*transforms.values()))
    permuted = ours.trained(
        ours.regression_model(), parts, af.compose(*[transforms[name] for name in order])
    )
    for (losses, parameters), (expected_losses, expected) in zip(permuted, listed, strict=True):
        ours.assert_identical(parameters, expected)
        assert losses == expected_losses


def test_gradient_transforms_run_in_the_order_listed():
    plan = make_plan()
    grads = af.Grads((torch.tensor([3.0, 0.1]),))
    results = []
    for recipe in (
        af.compose(af.clip(1.0), af.clip_value(0.5)),
        af.compose(af.clip_value(0.5), af.clip(1.0)),
    ):
        found = grads
        for transform in recipe(plan).gradients:
            found = transform(af.DistState(), found)
        results.append(found.values()[0])
    torch.testing.assert_close(results[0], torch.tensor([0.5, 0.1 / 9.01**0.5]), rtol=1e-4, atol=0)
    torch.testing.assert_close(results[1], torch.tensor([0.5, 0.1]))


def make_plan():
    model = ours.regression_model()
    return af.Plan(ours.mse, model, ours.sgd(model.parameters()))


def slots(plan):
    return {name: getattr(plan, name) for name in slot_names()}


@st.composite
def transforms(draw, max_size=3):
    names = draw(st.lists(st.sampled_from(list(TRANSFORMS)), max_size=max_size))
    return [TRANSFORMS[name] for name in names]


@given(first=transforms(), second=transforms(), third=transforms())
def test_compose_is_associative(first, second, third):
    plan = make_plan()
    a, b, c = af.compose(*first), af.compose(*second), af.compose(*third)
    flat = af.compose(*first, *second, *third)
    assert slots(af.compose(a, af.compose(b, c))(plan)) == slots(flat(plan))
    assert slots(af.compose(af.compose(a, b), c)(plan)) == slots(flat(plan))


@given(listed=transforms())
def test_the_empty_composition_is_the_identity(listed):
    plan = make_plan()
    recipe = af.compose(*listed)
    assert af.compose()(plan) is plan
    assert slots(af.compose(recipe, af.compose())(plan)) == slots(recipe(plan))
    assert slots(af.compose(af.compose(), recipe)(plan)) == slots(recipe(plan))


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transform_does_not_change_its_argument(transform):
    plan = make_plan()
    before, weights = slots(plan), copy.deepcopy(plan.model.state_dict())
    after = transform(plan)
    assert after is not plan
    assert slots(plan) == before
    ours.assert_identical(plan.model.state_dict(), weights)


def test_transforms_before_build_touch_no_object_of_the_users():
    plan = make_plan()
    keys, kind, forward = list(plan.model.state_dict()), type(plan.model), plan.model.forward
    af.build(af.DistState(), af.compose(*TRANSFORMS.values())(plan))
    assert (list(plan.model.state_dict()), type(plan.model)) == (keys, kind)
    assert plan.model.forward == forward
    assert not plan.model._forward_hooks
