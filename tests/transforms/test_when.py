"""when returns a transform or the identity."""

import numpy as np
import pytest
import torch

import accel_fn as af
from tests.support import strategies as ours


def plan():
    model = ours.regression_model()
    return af.Plan(ours.mse, model, ours.sgd(model.parameters()))


def test_a_transform_is_applied_if_the_condition_is_true():
    given = plan()
    assert repr(af.when(True, af.clip(1.0))(given)) == repr(af.clip(1.0)(given))
    assert repr(af.when(False, af.clip(1.0))(given)) == repr(given)


@pytest.mark.parametrize("condition", [True, False])
def test_it_prints_as_its_call(condition):
    recipe = af.compose(af.when(condition, af.clip(1.0)), af.accumulate(2))
    assert repr(recipe) == f"compose(when({condition}, clip(1.0)), accumulate(2))"


@pytest.mark.parametrize("condition", [1, "bf16", torch.tensor(True), np.float32(0.5)], ids=str)
def test_a_condition_is_what_if_takes(condition):
    given = plan()
    assert repr(af.when(condition, af.clip(1.0))(given)) == repr(af.clip(1.0)(given))


@pytest.mark.parametrize("condition", [0, 0.0, None, "", [], torch.tensor(False)], ids=str)
def test_a_function_without_parameters_is_called_if_the_condition_is_true(condition):
    given = plan()
    assert repr(af.when(condition, lambda: af.clip(0.0))(given)) == repr(given)
    called = af.when(not condition, lambda: af.clip(2.0))
    assert repr(called(given)) == repr(af.clip(2.0)(given))
    assert repr(called) == "when(True, <lambda>)"


def test_a_function_of_a_plan_is_a_transform_in_itself():
    def clips(plan):
        return af.clip(2.0)(plan)

    given = plan()
    assert repr(af.when(True, clips)(given)) == repr(af.clip(2.0)(given))


def test_what_a_function_without_parameters_returns_is_a_transform():
    with pytest.raises(TypeError, match="when: then must return a function Plan -> Plan, got None"):
        af.when(True, lambda: None)


@pytest.mark.parametrize("condition", [af.clip(1.0), lambda: True])
def test_a_condition_is_no_function(condition):
    with pytest.raises(TypeError, match=r"when: condition must be a value, got .*comes first"):
        af.when(condition, af.clip(1.0))


@pytest.mark.parametrize("condition", [True, False])
def test_a_transform_is_a_function_whatever_the_condition(condition):
    with pytest.raises(TypeError, match="when: then must be a function Plan -> Plan, got 1"):
        af.when(condition, 1)


def test_amp_of_no_precision_is_the_identity_whatever_the_launch_sets(monkeypatch):
    monkeypatch.setenv("ACCEL_FN_MIXED_PRECISION", "fp16")
    given = plan()
    assert repr(af.with_amp("no")(given)) == repr(given)
    assert repr(af.with_amp("no")) == "with_amp('no')"
