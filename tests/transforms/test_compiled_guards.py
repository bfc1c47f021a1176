"""compiled(scope="step") compares what its graph was made of before every step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accel_fn as af
from tests.support.compilers import needs_compiler
from tests.transforms.test_compiled_follows import compile_guards

X = torch.ones(8, 3, dtype=torch.float64)


STEP = af.compiled(scope="step")


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch):
    monkeypatch.setattr(torch, "compile", compile_guards)


def built(recipe=STEP, optimizer=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1)).double()
    optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    plan = af.Plan(lambda m, x: m(x).square().mean(), model, optimizer(model.parameters()))
    return *af.build(recipe(plan), af.DistState()), model, plan.optimizer


def replace(owner, name):
    method = getattr(owner, name)
    setattr(owner, name, lambda *args: method(*args))


CHANGES = {
    "optimizer hook": (lambda m, o: o.register_step_post_hook(print), "hooks"),
    "parameter hook": (lambda m, o: m[0].weight.register_hook(print), "hooks"),
    "post-accumulate hook": (
        lambda m, o: m[0].bias.register_post_accumulate_grad_hook(print),
        "hooks",
    ),
    "forward hook": (lambda m, o: m[0].register_forward_hook(print), "hooks"),
    "forward pre-hook": (lambda m, o: m.register_forward_pre_hook(print), "hooks"),
    "backward hook": (lambda m, o: m.register_full_backward_hook(print), "hooks"),
    "forward": (lambda m, o: replace(m[0], "forward"), "methods"),
    "step": (lambda m, o: replace(o, "step"), "methods"),
    "a parameter": (lambda m, o: setattr(m[0], "bias", nn.Parameter(X[0, :1])), "parameters"),
    "assign=True": (
        lambda m, o: m.load_state_dict(
            {k: v.clone() for k, v in m.state_dict().items()}, assign=True
        ),
        "parameters",
    ),
}


@needs_compiler
@pytest.mark.parametrize(("do", "what"), CHANGES.values(), ids=CHANGES)
def test_what_changes_after_build_is_refused(do, what):
    state, step, model, optimizer = built()
    do(model, optimizer)
    before = [each.clone() for each in model.parameters()]
    with pytest.raises(
        ValueError, match=f"must have the {what} .*that its graph was made of, got others"
    ):
        step(state, X)
    assert all(map(torch.equal, before, model.parameters()))


class Decaying(torch.optim.Optimizer):
    """An optimizer that counts in a tensor of its group."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "k": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                p.sub_(p.grad * (group["lr"] / group["k"]))


class First(torch.optim.Optimizer):
    """An optimizer that keeps the state of all parameters with the first."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            held = self.state[group["params"][0]]
            held["k"] = held.get("k", torch.zeros((), dtype=torch.float64)) + 1
            for p in group["params"]:
                p.sub_(p.grad * (group["lr"] / held["k"]))


@needs_compiler
@pytest.mark.parametrize(
    ("optimizer", "words"),
    [(Decaying, "in tensors outside of its state"), (First, "it keeps state of all parameters")],
)
def test_optimizers_whose_tensors_a_graph_would_not_follow_are_refused(optimizer, words):
    made = []
    with pytest.raises(ValueError, match=f"an optimizer that fits into a graph, .*{words}"):
        built(optimizer=lambda p: made.append(optimizer(p)) or made[0])
    assert made[0].param_groups[0].get("k", 0) == 0  # the trial writes to copies
