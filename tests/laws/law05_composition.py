"""Law 5: compose is associative, with an identity; transforms do not change their argument."""

import copy
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

import accel_fn as af
from tests.laws.law04_order_of_transforms import MORE, TRANSFORMS
from tests.support import strategies as ours


def slots(plan):
    return {each.name: getattr(plan, each.name) for each in fields(plan)}


@st.composite
def transforms(draw, max_size=3):
    every = {**TRANSFORMS, **MORE}  # refusals come only from `build`
    names = draw(st.lists(st.sampled_from(list(every)), max_size=max_size))
    return [every[name] for name in names]


@given(first=transforms(), second=transforms(), third=transforms())
def test_compose_is_associative(first, second, third):
    plan = ours.plan()
    a, b, c = af.compose(*first), af.compose(*second), af.compose(*third)
    flat = af.compose(*first, *second, *third)
    assert slots(af.compose(a, af.compose(b, c))(plan)) == slots(flat(plan))
    assert slots(af.compose(af.compose(a, b), c)(plan)) == slots(flat(plan))
    assert af.compose()(plan) is plan


@pytest.mark.parametrize("transform", (TRANSFORMS | MORE).values(), ids=TRANSFORMS | MORE)
def test_a_transform_does_not_change_its_argument(transform):
    plan = ours.plan()
    before, weights = slots(plan), copy.deepcopy(plan.model.state_dict())
    after = transform(plan)
    assert after is not plan
    assert slots(plan) == before
    ours.assert_identical(plan.model.state_dict(), weights)


def test_transforms_before_build_touch_no_object_of_the_users():
    plan = ours.plan()
    keys, kind, forward = list(plan.model.state_dict()), type(plan.model), plan.model.forward
    af.build(af.compose(*TRANSFORMS.values())(plan), af.DistState())
    assert (list(plan.model.state_dict()), type(plan.model)) == (keys, kind)
    assert plan.model.forward == forward
