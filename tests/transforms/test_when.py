"""when returns a transform or the identity."""

import pytest

import accel_fn as af
from tests import strategies as ours


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


@pytest.mark.parametrize("condition", [1, None, "bf16", af.clip(1.0)], ids=str)
def test_a_condition_is_a_bool(condition):
    with pytest.raises(TypeError, match="when: condition must be a bool, got"):
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
