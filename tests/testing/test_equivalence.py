"""assert_equivalent: what it compares, which mistakes it refuses, and the operation that it
names."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import accel_fn as af
from accel_fn.testing import assert_equivalent
from tests.support import strategies as ours

BATCHES = [(torch.arange(12.0).reshape(4, 3).double() / 10, torch.ones(4, 1).double())] * 2
PART = {"weight_fn": lambda batch: 0, "optimizer": ours.adamw}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}, "plan_a must move a parameter, got"),
        (PART, "batches must weigh something, got a weight of 0 for each"),
        (
            {"loss_fn": lambda model, batch: model[0].weight.sum()},
            "loss_fn must depend on the batch",
        ),
    ],
    ids=["rate", "weights", "loss"],
)
def test_where_every_plan_would_be_equivalent_none_is(given, text):
    plan = ours.plan(**given)
    with pytest.raises(ValueError, match=f"{text}.*: every two plans would be equivalent"):
        assert_equivalent(plan, af.accumulate(2)(plan), BATCHES)


def test_a_batch_of_equal_rows_is_one_that_a_loss_can_depend_on():
    plan = ours.plan()
    rows = torch.ones(4, 3).double(), torch.ones(4, 1).double()
    assert_equivalent(plan, af.accumulate(2)(plan), [rows])


def reporting(**change):
    """Make a gradient function whose report is wrong."""

    def wrap(grad_fn):
        def changed(state, batch):
            state, grads, report = grad_fn(state, batch)
            off = {name: change_one(getattr(report, name)) for name, change_one in change.items()}
            return state, grads, replace(report, **off)

        return changed

    return lambda plan: replace(plan, wrap_grad_fn=(wrap,))


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (reporting(loss=lambda loss: 2 * loss), "loss is"),
        (reporting(weight=lambda weight: weight + 1), r"weight is 4 with plan_a and 5 with plan_b"),
    ],
)
def test_plans_that_train_the_same_and_report_another_thing_are_distinguished(recipe, text):
    plan = ours.plan()
    with pytest.raises(AssertionError, match=f"plans must report the same, {text}.*after batch 0"):
        assert_equivalent(plan, recipe(plan), BATCHES)


def test_ranks_that_keep_their_own_first_parameters_are_distinguished(monkeypatch):
    monkeypatch.setattr(torch.nn.parallel.distributed, "_sync_module_states", lambda *a, **k: None)
    plan = ours.plan()
    with pytest.raises((AssertionError, RuntimeError), match=r"differs|equal on all ranks"):
        assert_equivalent(plan, af.wrap_ddp()(plan), BATCHES, world_sizes=(1, 2))


def doubled(parameter):
    parameter.grad.mul_(2.0)


@pytest.mark.parametrize(
    ("register", "hook"),
    [
        ("register_hook", lambda gradient: 2.0 * gradient),
        ("register_post_accumulate_grad_hook", doubled),
    ],
)
def test_hooks_of_parameters_train_in_copies_too(register, hook):
    plain, hooked = ours.plan(), ours.plan()
    getattr(hooked.model[0].weight, register)(hook)
    with pytest.raises(AssertionError, match=r"0\.weight differs"):
        assert_equivalent(plain, hooked, BATCHES)


def test_the_first_operation_whose_output_differs_is_named():
    class Doubled(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.inner, self.factor = ours.regression_model(), factor

        def forward(self, inputs):
            return self.inner(inputs) * self.factor

    plans = [ours.plan(model=Doubled(factor)) for factor in (1.0, 1.5)]
    with pytest.raises(
        AssertionError, match=r"operation \d+, aten.mul.Tensor, is the first whose output differs"
    ):
        assert_equivalent(*plans, BATCHES)


def test_an_operation_of_one_plan_alone_is_named():
    plan = ours.plan()
    with pytest.raises(AssertionError, match=r"with plan_a and aten._foreach_norm.Scalar with pla"):
        assert_equivalent(plan, af.clip(1e-3)(plan), BATCHES)
