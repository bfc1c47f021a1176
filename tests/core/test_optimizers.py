"""Every optimizer of torch.optim and torch_optimizer passes the checks, or fails as its row
states."""

import inspect
import re

import pytest
import torch
import torch_optimizer

import accel_fn as af
from tests.support.optimizers import (
    CONTRACT,
    PAGE,
    ROWS,
    batches,
    kinds,
    outcome,
    split_page,
    table,
    with_graph,
)
from tests.support.strategies import mse, regression_model

pytestmark = pytest.mark.filterwarnings("ignore:This overload of .* is deprecated:UserWarning")


# One of each kind: plain, factored, fused, with momenta, sparse, by a closure.
USUAL = [
    f"torch.optim.{name}"
    for name in (
        "AdamW",
        "Adafactor",
        "Adam(fused=True)",
        "SGD(lr=0.05, momentum=0.9, fused=True)",
        "SparseAdam",
        "LBFGS",
    )
]


def assert_fulfilled(name, check):
    """Assert that a row passes a check, or fails in the expected way: a repair must not go
    unnoticed."""
    result, refusal = outcome(name, check), ROWS[name].refusals.get(check)
    if refusal is not None:
        assert isinstance(result, refusal.error), f"{name} now works: take out the refusal"
        assert re.search(refusal.match, str(result))
    elif isinstance(result, Exception):
        raise result


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in USUAL)) for name in ROWS],
)
def test_an_optimizer_passes_the_checks_of_its_row(name):
    """A step, one that accumulates and clips, two uneven ranks, and an overflow in float16."""
    for check in CONTRACT:
        assert_fulfilled(name, check)


@pytest.mark.parametrize("library", [torch.optim, torch_optimizer], ids=lambda each: each.__name__)
def test_every_public_optimizer_has_a_row(library):
    assert kinds(library) <= {row.kind for row in ROWS.values()}


def test_every_fused_optimizer_has_a_row():
    fused = {kind for kind in kinds(torch.optim) if "fused" in inspect.signature(kind).parameters}
    assert fused == {row.kind for row in ROWS.values() if row.options.get("fused")}


@pytest.mark.slow
def test_page_holds_the_table_of_this_torch():
    _, written, _ = split_page(PAGE.read_text(encoding="utf-8"))
    assert written.strip() == table().strip(), (
        "to write it anew: python -m tests.support.optimizers"
    )


def test_closure_is_refused_before_anything_is_trained():
    model = regression_model()
    plan = af.Plan(mse, model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(
        ValueError,
        match=r"build: optimizer must update from gradients alone, got LBFGS, whose step evaluates "
        r"the loss again; use another, or step\.grads in a loop of your own",
    ):
        af.build(plan, af.DistState())


def test_gradient_function_gives_a_second_order_optimizer_its_graph():
    by_hand, model = regression_model(), regression_model()
    optimizer = torch_optimizer.Adahessian(by_hand.parameters())
    torch.manual_seed(0)
    for batch in batches(torch.float64):
        found = torch.autograd.grad(
            mse(by_hand, batch), list(by_hand.parameters()), create_graph=True
        )
        for parameter, gradient in zip(by_hand.parameters(), found, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()

    plan = af.Plan(mse, model, torch_optimizer.Adahessian(model.parameters()))
    state, step = af.build(with_graph(plan), af.DistState())
    torch.manual_seed(0)
    for batch in batches(torch.float64):
        state, _ = step(state, batch)

    for actual, expected in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(actual, expected)
