"""Steps of fused optimizers by one call of the kernel: bits, and what goes to the optimizer's own step."""

import copy
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, AdamW

import accel_fn as af
from accel_fn.testing import strategies
from accel_fn.testing.internals import apply_update

NUMBERS = st.sampled_from([0.0, 0.01, 0.3])
ADAM = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.1, torch.tensor(0.1)]),
        "betas": st.sampled_from(
            [(0.9, 0.999), (0.5, 0.5), (torch.tensor(0.9), torch.tensor(0.99))]
        ),
        "weight_decay": st.one_of(NUMBERS, st.just(torch.tensor(0.1))),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
    }
)
MOMENTUM = st.sampled_from([{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
PLAIN = st.fixed_dictionaries(
    {"lr": st.just(0.1), "weight_decay": NUMBERS, "maximize": st.booleans()}
)


@st.composite
def optimizers(draw):
    """Draw a class of optimizers and the settings of two groups."""
    kind = draw(st.sampled_from([Adam, AdamW, SGD]))
    groups = [draw(ADAM) if kind is not SGD else draw(PLAIN) | draw(MOMENTUM) for _ in range(2)]
    return kind, [{"fused": True, **each} for each in groups]


def made(kind, groups):
    generator = torch.Generator().manual_seed(0)
    every = [nn.Parameter(torch.randn(3, 2, generator=generator)) for _ in range(3)]
    given_groups = zip((every[:1], every[1:]), groups, strict=True)
    return every, kind([{"params": some, **each} for some, each in given_groups])


def update(optimizer, trained, gradients, factor=None):
    apply_update(optimizer, trained, af.Grads(tuple(gradients), factor), None)


def state_of(optimizer):
    return [dict(optimizer.state[p]) for g in optimizer.param_groups for p in g["params"]]


@given(made_by=optimizers(), seed=strategies.seeds(), unused=st.booleans(), factor=st.booleans())
def test_four_updates_have_the_bits_of_the_optimizers_own_step(made_by, seed, unused, factor):
    ours, optimizer = made(*made_by)
    by_hand, other = made(*copy.deepcopy(made_by))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):
        gradients = [torch.randn(3, 2, generator=generator) for _ in ours]
        if unused:
            gradients[2] = None
        for each, gradient in zip(by_hand, gradients, strict=True):
            each.grad = None if gradient is None else gradient * (0.5 if factor else 1.0)
        other.step()
        open_factor = torch.tensor(0.5) if factor else None
        update(optimizer, ours, gradients, open_factor)
    torch.testing.assert_close(
        [ours, state_of(optimizer)], [by_hand, state_of(other)], rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Adam, {"amsgrad": True}),
        (AdamW, {"lr": torch.tensor(0.1)}),
        (SGD, {"momentum": 0.9}),
        (SGD, {}),
    ],
)
def test_the_kernel_alone_runs_once_the_state_is_there(kind, settings, monkeypatch):
    trained, optimizer = made(kind, [{"lr": 0.1, "fused": True, **settings}] * 2)
    gradients = [torch.ones_like(each) for each in trained]
    update(optimizer, trained, gradients)

    def fail(*_):
        raise AssertionError("the optimizer's own step has run")

    monkeypatch.setattr(kind, "_init_group", fail)
    before = trained[0].detach().clone()
    update(optimizer, trained, gradients)
    assert not torch.equal(trained[0], before)


def test_a_scheduler_of_torch_knows_that_the_optimizer_has_made_a_step():
    trained, optimizer = made(AdamW, [{"lr": 0.1, "fused": True}] * 2)
    gradients = [torch.ones_like(each) for each in trained]
    update(optimizer, trained, gradients)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    update(optimizer, trained, gradients)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


@pytest.mark.parametrize("change", ["no state", "a sparse gradient", "not fused"])
def test_what_the_kernel_does_not_take_goes_to_the_optimizers_own_step(change, monkeypatch):
    trained, optimizer = made(SGD, [{"lr": 0.1, "momentum": 0.9, "fused": True}] * 2)
    gradients = [torch.ones_like(each) for each in trained]
    update(optimizer, trained, gradients)
    if change == "no state":
        optimizer.state.pop(trained[1])
    elif change == "a sparse gradient":
        gradients[1] = gradients[1].to_sparse()
    else:
        optimizer.param_groups[1]["fused"] = False
    called = []
    monkeypatch.setattr(SGD, "_init_group", lambda *_: called.append(True))
    update(optimizer, trained, gradients)
    assert called
